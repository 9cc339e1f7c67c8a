"""The transport: its bounds, and windows that come back."""

import asyncio
import struct

import grpclib
import h2.connection
import h2.errors
import h2.events
import pytest
from grpclib.protocol import Connection, EventsProcessor, H2Protocol, Stream
from grpclib.server import Handler, Server
from hpack import Encoder

from pykv.service.http2 import BoundedH2Connection
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import TransportLimits
from pykv.service.transport import connection as connection_module
from pykv.service.transport import turns as turns_module
from pykv.service.transport.events import BoundedConnection, CallEvents
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.handler import CallHandler

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT = 3
UNIMPLEMENTED = 12
MAX_CONCURRENT_STREAMS = 3


def test_the_private_parts_that_the_transport_stands_on_are_there():
    assert grpclib.__version__ == "0.4.9"
    assert {"close", "wait_closed", "__gc_step__"} <= set(dir(Server))
    assert {"accept", "cancel", "wait_closed", "__gc_step__"} <= set(dir(Handler))
    assert {"create_stream", "flush", "initialize", "ack", "feed"} <= set(dir(Connection))
    assert {"process", "process_request_received", "process_data_received"} <= set(dir(EventsProcessor))
    assert {"connection_made", "connection_lost", "data_received"} <= set(dir(H2Protocol))
    assert {"pause_writing", "resume_writing"} <= set(dir(H2Protocol))
    assert {"recv_data", "send_data", "init_stream", "__terminated__"} <= set(dir(Stream))
    h2_connection = h2.connection.H2Connection()
    assert {"_frame_dispatch_table", "_closed_streams", "local_settings"} <= set(vars(h2_connection))
    assert {"MAX_CLOSED_STREAMS", "_receive_settings_frame"} <= set(dir(h2_connection))
    assert "_update_encoding_context" in dir(h2_connection.decoder)
    assert hasattr(h2_connection, "highest_inbound_stream_id")
    assert h2_connection.encoder.table_size_changes == []


def prompt(num_bytes=0, **values):
    return pb.GenerateRequest(text="x" * num_bytes, **values)


@pytest.mark.asyncio
async def test_thousands_of_streams_are_allowed_on_one_connection(raw):
    assert raw.h2.remote_settings.max_concurrent_streams == 4096


@pytest.mark.asyncio
async def test_five_hundred_streams_run_at_once_on_one_connection(raw, framed, engine):
    engine.hold()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=2))
    streams = [raw.request(GENERATE, framed(request)) for _ in range(500)]
    await raw.flush()
    await engine.until(lambda: len(engine.live) == 500)
    engine.release()
    assert [await raw.status(stream_id) for stream_id in streams] == [(0, "")] * 500


async def window_after(raw, calls):
    """The connection's window once all of `calls` and a ping have been answered."""
    for call in calls:
        await call()
    raw.h2.ping(b"12345678")
    await raw.flush()
    await raw.wait_for(h2.events.PingAckReceived)
    return raw.h2.outbound_flow_control_window


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "num_calls", [600, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_early_rejections_give_the_connections_window_back(raw, framed, num_calls):
    """Each call ends before the server has read all of its message."""

    async def rejected():
        stream_id = raw.request(GENERATE, framed(b"x" * 10_000, length=2**31), end_stream=False)
        await raw.flush()
        assert (await raw.status(stream_id))[0] == 8
        raw.events.clear()

    assert await window_after(raw, [rejected] * num_calls) > 2**20


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "num_calls", [1500, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_unary_calls_that_fail_give_the_connections_window_back(
    start_daemon, raw_open, framed, num_calls
):
    raw = await raw_open((await start_daemon(control_frames_burst=10**6)).address)

    async def rejected():
        stream_id = raw.request("/pykv.v1.Engine/Unknown", framed(b"x" * 4000))
        await raw.flush()
        assert (await raw.status(stream_id))[0] == 12
        raw.events.clear()

    assert await window_after(raw, [rejected] * num_calls) > 2**20
    await raw.close()


@pytest.mark.asyncio
async def test_resets_that_arrive_with_their_request_give_the_connections_window_back(raw, framed):
    """Such a call is never begun; as many as may be reset at once send more than the window holds."""
    num_calls, size = 450, 16_000
    assert num_calls * size > raw.h2.outbound_flow_control_window

    async def reset():
        stream_id = raw.request(GENERATE, framed(b"x" * size), end_stream=False)
        raw.h2.reset_stream(stream_id)
        await raw.flush()

    async def ping():
        await window_after(raw, [])

    assert await window_after(raw, [reset, ping] * num_calls) > 2**20


@pytest.mark.asyncio
async def test_no_stream_is_kept_after_resets(raw, framed, daemon):
    for _ in range(50):
        stream_id = raw.request(GENERATE, framed(b"x" * 100), end_stream=False)
        raw.h2.reset_stream(stream_id)
    await window_after(raw, [])
    (connection,) = daemon.daemon._server._connections
    await asyncio.sleep(0)
    assert not connection.processor.streams


async def sent_away(raw):
    """The code of the GOAWAY with which the server closed the connection."""
    code = (await raw.wait_for(h2.events.ConnectionTerminated)).error_code
    with pytest.raises(ConnectionError):
        await raw.wait_for(h2.events.ConnectionTerminated)
    return code


CHEAP_FRAMES = {
    "settings": b"\0\0\0\4\0\0\0\0\0",
    "ping": b"\0\0\x08\6\0\0\0\0\x0012345678",
    "priority": b"\0\0\5\2\0\0\0\0\1\0\0\0\0\0",
    "empty data": b"\0\0\0\0\0\0\0\0\1",
    "unknown": b"\0\0\0\xbe\0\0\0\0\0",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("frame", CHEAP_FRAMES.values(), ids=CHEAP_FRAMES)
async def test_a_flood_of_cheap_frames_closes_its_connection_alone(raw, client, frame, caplog):
    raw.request(GENERATE, end_stream=False)
    await raw.flush()
    for _ in range(8):
        raw.writer.write(frame * 500)
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert caplog.text.count("connection closed") == 1
    assert await client.health() == "SERVING"


WINDOW_UPDATE = b"\0\0\4\x08\0\0\0\0\0\0\0\0\1"


@pytest.mark.asyncio
async def test_a_flood_of_window_updates_closes_its_connection_alone(raw, client, caplog):
    """They cost a tenth of the others, since peers that read send many."""
    raw.writer.write(WINDOW_UPDATE * 40_000)
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert caplog.text.count("connection closed") == 1
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
async def test_of_window_updates_that_come_together_all_streams_are_told_once(
    raw, daemon, framed, monkeypatch
):
    told = []
    process = CallEvents.process

    def remember(self, event):
        if isinstance(event, h2.events.WindowUpdated):
            told.append(event.stream_id)
        process(self, event)

    monkeypatch.setattr(CallEvents, "process", remember)
    first = raw.request(GENERATE, end_stream=False)
    (connection,) = daemon.daemon._server._connections
    await window_after(raw, [])
    window = connection.connection.h2.outbound_flow_control_window
    raw.writer.write(WINDOW_UPDATE * 9000 + b"\0\0\4\x08\0" + first.to_bytes(4, "big") + b"\0\0\0\1")
    await window_after(raw, [])
    assert connection.connection.h2.outbound_flow_control_window == window + 9000
    assert told.count(first) == 1
    assert 1 <= told.count(0) < 100  # once each time that the socket was read


@pytest.mark.asyncio
async def test_settings_cost_more_where_many_streams_are_told_of_them(raw, client):
    """Each would be told; 400 of them are few on a connection with few calls."""
    settings = b"".join(settings_frame([(4, 2**17 + number % 2)]) for number in range(400))
    raw.writer.write(settings)
    await window_after(raw, [])
    for _ in range(600):
        raw.request(GENERATE, end_stream=False)
    await window_after(raw, [])
    raw.writer.write(settings)
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
async def test_a_flood_of_calls_that_are_reset_closes_its_connection_and_begins_none(
    raw, framed, client, engine, caplog
):
    request = framed(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])))
    for _ in range(4000):
        raw.h2.reset_stream(raw.request(GENERATE, request))
    await raw.flush()
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert caplog.text.count("connection closed") == 1
    assert await client.health() == "SERVING"
    assert not engine.scopes


@pytest.mark.asyncio
async def test_a_call_that_is_reset_as_it_comes_gets_no_task(raw, framed, monkeypatch):
    begun = []
    accept = CallHandler.accept

    def remember(self, stream, *rest):
        begun.append(stream.id)
        accept(self, stream, *rest)

    monkeypatch.setattr(CallHandler, "accept", remember)
    for _ in range(10):
        raw.h2.reset_stream(raw.request(GENERATE, framed(pb.GenerateRequest())))
    kept = raw.request(GENERATE, framed(pb.GenerateRequest()))
    await raw.flush()
    assert (await raw.status(kept))[0] == INVALID_ARGUMENT
    assert begun == [kept]


@pytest.mark.asyncio
async def test_errors_that_make_the_server_reset_a_call_count_as_resets(raw, client):
    """A window that overflows is the client's error, which ends its stream alone."""
    for _ in range(1500):
        stream_id = raw.request(GENERATE, end_stream=False)
        raw.writer.write(raw.h2.data_to_send())
        raw.writer.write(b"\0\0\4\x08\0" + stream_id.to_bytes(4, "big") + b"\x7f\xff\xff\xff")
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
async def test_hundreds_of_calls_may_be_reset_at_once(raw, framed, engine):
    engine.hold()
    request = framed(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])))
    streams = [raw.request(GENERATE, request) for _ in range(900)]
    await raw.flush()
    await engine.until(lambda: len(engine.live) == 900)
    for stream_id in streams:
        raw.h2.reset_stream(stream_id)
    await window_after(raw, [])
    await engine.until(lambda: not engine.live)


def test_the_allowance_fills_with_time_and_sees_frames_however_they_are_cut():
    now = [0.0]
    limits = TransportLimits(control_frames_burst=10, control_frames_per_second=2.0)
    ping = CHEAP_FRAMES["ping"]
    end = b"\0\0\0\0\1\0\0\0\1"
    sent = b"P" * 24 + 10 * (ping + end)
    for size in (1, 5, 9, 1000):
        meter = FrameMeter(limits, lambda: now[0])
        for place in range(0, len(sent), size):
            meter.read(sent[place : place + size])
        assert not meter.is_overdrawn
        meter.read(ping)
        assert meter.is_overdrawn
        now[0] += 1.0
        meter.read(ping)
        assert not meter.is_overdrawn


@pytest.mark.asyncio
async def test_an_empty_frame_inside_a_message_is_no_end(raw, framed):
    request = framed(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=1))
    )
    stream_id = raw.request(GENERATE, request[:7], end_stream=False)
    raw.h2.send_data(stream_id, b"")
    raw.h2.send_data(stream_id, request[7:], end_stream=True)
    await raw.flush()
    assert (await raw.status(stream_id))[0] == 0


@pytest.mark.asyncio
async def test_frames_of_unknown_types_are_ignored(raw, framed):
    raw.writer.write(b"\x00\x00\x04\xbe\x00\x00\x00\x00\x00abcd")
    stream_id = raw.request(GENERATE, framed(pb.GenerateRequest()))
    await raw.flush()
    assert (await raw.status(stream_id))[0] == INVALID_ARGUMENT


@pytest.mark.asyncio
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, bytes(range(256)) * 10])
async def test_a_connection_of_garbage_is_closed_and_others_go_on(daemon, client, garbage, collect):
    host, port = daemon.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(garbage)
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
async def test_a_malformed_timeout_is_answered(raw, framed):
    stream_id = raw.request(GENERATE, framed(prompt()), timeout="soon")
    await raw.flush()
    assert (await raw.status(stream_id))[0] != 0


@pytest.mark.asyncio
async def test_nothing_of_a_call_is_kept_once_it_has_ended(raw, framed, daemon):
    (connection,) = daemon.daemon._server._connections
    for _ in range(3):
        begun = [raw.request(GENERATE, framed(pb.GenerateRequest())) for _ in range(5)]
        await raw.flush()
        assert [(await raw.status(stream_id))[0] for stream_id in begun] == [INVALID_ARGUMENT] * 5
        await window_after(raw, [])
        assert not connection.handler._tasks
        assert not connection.handler._cancelled


@pytest.mark.asyncio
async def test_of_many_calls_on_one_connection_few_ends_are_remembered(daemon, raw_open, framed, monkeypatch):
    assert BoundedH2Connection.MAX_CLOSED_STREAMS <= 1024
    monkeypatch.setattr(BoundedH2Connection, "MAX_CLOSED_STREAMS", 20)
    raw = await raw_open(daemon.address)
    (connection,) = daemon.daemon._server._connections
    first = raw.request(GENERATE, framed(pb.GenerateRequest()), end_stream=False)
    begun = [raw.request("/pykv.v1.Engine/None", b"") for _ in range(60)]
    await raw.flush()
    for stream_id in begun:
        await raw.status(stream_id)
    forgotten, last = begun[0], raw.request("/pykv.v1.Engine/None", b"")
    # What was on its way to a call that ended meanwhile does no harm, and one that lasts is not forgotten.
    raw.writer.write(b"\0\0\1\0\0" + forgotten.to_bytes(4, "big") + b"x")
    raw.h2.send_data(first, b"", end_stream=True)
    await raw.flush()
    assert (await raw.status(first))[0] == INVALID_ARGUMENT
    assert (await raw.status(last))[0] == UNIMPLEMENTED
    assert len(connection.connection.h2._closed_streams) == 20
    await raw.close()


def settings_frame(settings):
    body = b"".join(struct.pack(">HL", *setting) for setting in settings)
    return len(body).to_bytes(3, "big") + b"\4\0\0\0\0\0" + body


@pytest.mark.asyncio
async def test_unknown_settings_are_ignored_and_the_table_of_sent_headers_stays_small(raw, framed, daemon):
    """A peer might name 65 536 settings, and let what each header said be kept for good."""
    (connection,) = daemon.daemon._server._connections
    h2_connection = connection.connection.h2
    num_settings = len(h2_connection.remote_settings)
    for first in range(100, 2**16, 2700):
        raw.writer.write(settings_frame((code, 1) for code in range(first, min(first + 2700, 2**16))))
    raw.writer.write(settings_frame([(1, 2**32 - 1), (6, 2**20)]))
    await window_after(raw, [])
    assert len(h2_connection.remote_settings) <= num_settings + 1
    assert h2_connection.remote_settings.max_header_list_size == 2**20
    for number in range(100):  # each is answered by a message of its own
        session = pb.Retention(session_id="x" * (300 + number))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), retention=session)
        stream_id = raw.request(GENERATE, framed(request))
        await raw.flush()
        assert str(300 + number) in (await raw.status(stream_id))[1]
    assert h2_connection.encoder.header_table._current_size <= 4096


@pytest.mark.asyncio
async def test_sizes_of_the_table_of_headers_are_heeded_and_not_collected(raw, daemon, framed):
    (connection,) = daemon.daemon._server._connections
    for size in [100, 0, 4096] * 100 + [200]:
        raw.writer.write(settings_frame([(1, size)]))
    raw.h2.decoder.max_allowed_table_size = 4096
    await window_after(raw, [])
    assert connection.connection.h2.encoder.table_size_changes == [0, 200]
    for _ in range(2):
        stream_id = raw.request(GENERATE, framed(pb.GenerateRequest()))
        await raw.flush()
        assert (await raw.status(stream_id))[0] == INVALID_ARGUMENT
    assert raw.h2.decoder.header_table_size == 200


USUAL = {
    ":method": "POST",
    ":scheme": "http",
    ":path": GENERATE,
    ":authority": "test",
    "te": "trailers",
    "content-type": "application/grpc",
}
TINY_FIELD = b"\x8f"  # an empty accept-charset, which HPACK knows


def headers_frame(stream_id, headers, more=b"", *, end_stream=True):
    """HEADERS as bytes, so that they may say what no client would; `more` is appended to the block."""
    block = Encoder().encode(list(headers.items()), huffman=False) + more
    return len(block).to_bytes(3, "big") + bytes([1, 4 + end_stream]) + stream_id.to_bytes(4, "big") + block


async def begin_a_call(daemon, raw, framed):
    """Begins call 1, which lasts until the engine goes on; 3 is the test's to send."""
    daemon.engine.hold()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=2))
    assert raw.request(GENERATE, framed(request)) == 1
    await raw.flush()
    raw.request(GENERATE, end_stream=False)
    raw.h2.data_to_send()  # not sent: the test says it in other words


MALFORMED = {
    "no method": {name: value for name, value in USUAL.items() if name != ":method"},
    "no scheme": {name: value for name, value in USUAL.items() if name != ":scheme"},
    "no path": {name: value for name, value in USUAL.items() if name != ":path"},
    "an answer": {":status": "200"},
    "nothing": {},
    "a name of no ASCII": USUAL | {"é": "1"},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_headers_reset_their_stream_alone(daemon, raw, framed, headers, caplog):
    await begin_a_call(daemon, raw, framed)
    raw.writer.write(headers_frame(3, headers, end_stream=False) + b"\0\0\1\0\1\0\0\0\3x")
    reset = await raw.wait_for(h2.events.StreamReset)
    assert (reset.stream_id, reset.error_code) == (3, h2.errors.ErrorCodes.PROTOCOL_ERROR)
    daemon.engine.release()
    assert (await raw.status(1))[0] == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


UNWELCOME = {
    "no ASCII": ({"x-user": "Jürgen"}, INVALID_ARGUMENT, "'x-user' is not ASCII"),
    "a path of no ASCII": ({":path": "/ü"}, INVALID_ARGUMENT, "':path' is not ASCII"),
    "a timeout of no ASCII": ({"grpc-timeout": "1ü"}, INVALID_ARGUMENT, "'grpc-timeout' is not ASCII"),
    "a lone character of base64": ({"x-bin": "A"}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "no base64": ({"x-bin": "***"}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "base64 with a space": ({"x-bin": "AA AA"}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "base64 of URLs": ({"x-bin": "_-8="}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "base64 padded amid": ({"x-bin": "AA==AAAA"}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "one of two that is no base64": ({"x-bin": "AAAA,*"}, INVALID_ARGUMENT, "'x-bin' is not base64"),
    "too large": ({"x": "a" * 16_150}, 8, "allowed is 16384"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("end_stream", [True, False])
@pytest.mark.parametrize(("headers", "status", "message"), UNWELCOME.values(), ids=UNWELCOME)
async def test_headers_that_are_refused_end_their_call_alone(
    daemon, raw, framed, headers, status, message, end_stream, caplog
):
    await begin_a_call(daemon, raw, framed)
    raw.writer.write(headers_frame(3, USUAL | headers, end_stream=end_stream))
    received, text = await raw.status(3)
    assert (received, message in text) == (status, True)
    daemon.engine.release()
    assert (await raw.status(1))[0] == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["", "AA", "AA==", "AAA", "AAA=", "AA+/", "AA==,AAAA", "AAAA,AAAA"])
async def test_base64_may_be_padded_or_not_and_joined(daemon, raw, framed, value):
    await begin_a_call(daemon, raw, framed)
    message = framed(pb.GenerateRequest())
    data = len(message).to_bytes(3, "big") + b"\0\1\0\0\0\3" + message
    raw.writer.write(headers_frame(3, USUAL | {"x-bin": value}, end_stream=False) + data)
    status, text = await raw.status(3)
    assert (status, "prompt" in text, "metadata" in text) == (INVALID_ARGUMENT, True, False)


@pytest.mark.asyncio
async def test_a_flood_of_tiny_header_fields_closes_its_connection_alone(raw, client, caplog):
    """Each is one byte to send, and much more to read."""
    flood = b"".join(headers_frame(number, USUAL, TINY_FIELD * 300) for number in range(1, 401, 2))
    raw.writer.write(flood)
    async with asyncio.timeout(20):
        assert b"too many resets, control frames or header fields" in await raw.reader.read()
    assert caplog.text.count("connection closed") == 1
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
@pytest.mark.parametrize("block", [b"\x20" * 3, TINY_FIELD * 2000], ids=["table sizes", "fields"])
async def test_a_block_of_headers_that_is_no_honest_one_closes_its_connection(raw, block, client):
    frame = len(block).to_bytes(3, "big") + b"\1\5\0\0\0\1" + block
    raw.writer.write(frame)
    with pytest.raises(ConnectionError):
        await raw.status(1)
    assert await client.health() == "SERVING"


def test_the_headers_of_usual_calls_cost_nothing_and_large_ones_something():
    limits = TransportLimits(control_frames_burst=10)
    meter = FrameMeter(limits, lambda: 0.0)
    meter.read(b"P" * 24)
    for _ in range(50_000):
        meter.read(b"\0\4\0\1\5\0\0\0\1" + bytes(1024))
        meter.charge_fields(32)
    meter.charge(10.0)
    assert not meter.is_overdrawn
    meter.read(b"\0\4\1\1\5\0\0\0\1" + bytes(1025))
    assert meter.is_overdrawn
    meter = FrameMeter(limits, lambda: 0.0)
    meter.charge_fields(32 + 101)
    assert meter.is_overdrawn


@pytest.mark.asyncio
@pytest.mark.parametrize("max_unfed", [2**18, 2**13], ids=["reading on", "pausing"])
async def test_who_sends_much_at_once_leaves_the_others_their_turns(daemon, raw, monkeypatch, max_unfed):
    """Of a burst each turn of the loop does a little, in order, and nothing is lost."""
    monkeypatch.setattr(turns_module, "TURN_SECONDS", 1e-9)
    monkeypatch.setattr(connection_module, "MAX_BACKLOG_BYTES", max_unfed)
    (connection,) = daemon.daemon._server._connections
    loop, turn, fed, were_reading = asyncio.get_running_loop(), [0], [], set()
    feed = BoundedConnection.feed

    def remember(self, data):
        fed.append((turn[0], len(data)))
        were_reading.add(connection._transport.is_reading())
        return feed(self, data)

    def count():
        turn[0] += 1
        if turn[0] >= 0:
            loop.call_soon(count)

    monkeypatch.setattr(BoundedConnection, "feed", remember)
    begun = [raw.request("/pykv.v1.Engine/None", bytes(64)) for _ in range(500)]
    sent = raw.h2.data_to_send()
    count()
    raw.writer.write(sent)
    assert [(await raw.status(stream_id))[0] for stream_id in begun] == [UNIMPLEMENTED] * 500
    turns = [number for number, _ in fed]
    turn[0] = -2  # counts no more
    assert len(sent) > 10 * 4096
    assert max(size for _, size in fed) <= 4096
    assert len(set(turns)) > len(turns) // 2  # what was just read may share the turn of the last of before
    assert were_reading == ({True} if max_unfed == 2**18 else {True, False})
    assert connection._transport.is_reading()


@pytest.mark.asyncio
async def test_unfinished_messages_of_a_connection_are_bounded_together(
    start_daemon, raw_open, framed, eventually
):
    """The window comes back while a message is read: alone it bounds nothing. One that is finished counts no more."""
    daemon = await start_daemon(max_message_size=100_000, request_memory=1_600_000)
    raw, memory = await raw_open(daemon.address), daemon.daemon._server._memory
    part, rest = framed(b"\xff" * 90_000, length=100_000), bytes(10_000)
    begun = [await raw.send(GENERATE, part, end_stream=False) for _ in range(4)]
    waits = await raw.send(GENERATE, part[:60_000], end_stream=False)

    async def one_waits():
        return (memory.num_bytes, memory.num_waiting) == (400_000, 1)  # a third of what large ones have

    await eventually(one_waits)
    for stream_id in begun:
        raw.h2.send_data(stream_id, rest, end_stream=True)
    await raw.flush()
    assert [(await raw.status(stream_id))[0] for stream_id in begun] == [INVALID_ARGUMENT] * 4
    async with asyncio.timeout(20):
        while raw.h2.local_flow_control_window(waits) < 40_000:
            await raw._read()
    for data in (part[60_000:76_000], part[76_000:], rest):
        raw.h2.send_data(waits, data, end_stream=data is rest)
    await raw.flush()
    assert (await raw.status(waits))[0] == INVALID_ARGUMENT
    assert memory.num_bytes == 0
    await raw.close()
