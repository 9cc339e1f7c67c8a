"""The transport: its bounds, and windows that come back."""

import asyncio

import grpclib
import h2.connection
import h2.errors
import h2.events
import pytest
from grpclib.protocol import Connection, EventsProcessor, H2Protocol, Stream
from grpclib.server import Handler, Server

from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import TransportLimits
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.handler import CallHandler

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT = 3
MAX_CONCURRENT_STREAMS = 3


def test_the_private_parts_that_the_transport_stands_on_are_there():
    assert grpclib.__version__ == "0.4.9"
    assert {"_protocol_factory", "close", "wait_closed", "__gc_step__"} <= set(dir(Server))
    assert {"accept", "cancel", "wait_closed"} <= set(dir(Handler))
    assert {"create_stream", "flush", "initialize", "ack", "feed"} <= set(dir(Connection))
    assert {"process", "process_request_received", "process_data_received"} <= set(dir(EventsProcessor))
    assert {"connection_made", "connection_lost", "data_received"} <= set(dir(H2Protocol))
    assert {"pause_writing", "resume_writing"} <= set(dir(H2Protocol))
    assert {"recv_data", "send_data", "init_stream", "__terminated__"} <= set(dir(Stream))
    h2_connection = h2.connection.H2Connection()
    assert {"_frame_dispatch_table", "local_settings"} <= set(vars(h2_connection))
    assert hasattr(h2_connection, "highest_inbound_stream_id")


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
@pytest.mark.parametrize("num_calls", [600, pytest.param(20_000, marks=pytest.mark.long)])
async def test_early_rejections_give_the_connections_window_back(raw, framed, num_calls):
    """Each call ends before the server has read all of its message."""

    async def rejected():
        stream_id = raw.request(GENERATE, framed(b"x" * 10_000, length=2**31), end_stream=False)
        await raw.flush()
        assert (await raw.status(stream_id))[0] == 8
        raw.events.clear()

    assert await window_after(raw, [rejected] * num_calls) > 2**20


@pytest.mark.asyncio
@pytest.mark.parametrize("num_calls", [1500, pytest.param(20_000, marks=pytest.mark.long)])
async def test_unary_calls_that_fail_give_the_connections_window_back(raw, framed, num_calls):
    async def rejected():
        stream_id = raw.request("/pykv.v1.Engine/Unknown", framed(b"x" * 4000))
        await raw.flush()
        assert (await raw.status(stream_id))[0] == 12
        raw.events.clear()

    assert await window_after(raw, [rejected] * num_calls) > 2**20


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
    for _ in range(3):
        raw.writer.write(frame * 500)
    assert await sent_away(raw) == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert caplog.text.count("connection closed") == 1
    assert await client.health() == "SERVING"


@pytest.mark.asyncio
async def test_a_flood_of_calls_that_are_reset_closes_its_connection_and_begins_none(
    raw, framed, client, engine, caplog
):
    request = framed(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])))
    for _ in range(1001):
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
