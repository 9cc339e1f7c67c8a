"""What a broken or hostile server answers ends its call with a clear error, and no other call of the connection."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
)

from pykv.client import Client, ServiceError
from pykv.errors import ConfigError
from pykv.service.client import events as client_events
from pykv.service.client.channel import DEFAULT_MAX_MESSAGE_BYTES
from pykv.service.client.reply_stream import STREAM_WINDOW_BYTES
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE, EVENTS = "/pykv.v1.Engine/Generate", "/pykv.v1.Engine/SubscribeKvEvents"
STATUS, TYPE = (":status", "200"), ("content-type", "application/grpc")
BATCH = pb.KvEventBatch(sequence_number=7)


def framed(message, *, flag=0, length=None):
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return bytes([flag]) + (len(data) if length is None else length).to_bytes(4, "big") + data


def answering(data=b"", *, headers=(STATUS, TYPE), trailers=None, ends=False):
    """An answer of these parts; the call stays open without trailers, unless the data is its end."""

    def answer(connection, stream_id):
        if headers:
            connection.send_headers(stream_id, headers, end_stream=ends and not data)
        if data:
            connection.send_data(stream_id, data, end_stream=ends)
        if trailers is not None:
            connection.send_headers(stream_id, trailers, end_stream=True)

    return answer


def resetting(code, data=b""):
    def answer(connection, stream_id):
        answering(data)(connection, stream_id)
        connection.reset_stream(stream_id, code)

    return answer


OK = [("grpc-status", "0")]
PADDED = [("x-long", "a" * 12_000)]
BAD = {
    "an announced length of 4 GiB": (
        answering(framed(b"", length=2**32 - 1)),
        "RESOURCE_EXHAUSTED",
        "4294967295 bytes",
    ),
    "a length above the bound": (
        answering(framed(b"", length=2**26 + 1)),
        "RESOURCE_EXHAUSTED",
        "max_message_bytes, 67108864",
    ),
    "a compressed message": (answering(framed(b"a", flag=1)), "INTERNAL", "compressed"),
    "a flag that is none": (answering(framed(b"a", flag=7)), "INTERNAL", "flag 7"),
    "another framing": (answering(b"data: {}\n\n", trailers=OK), "INTERNAL", "flag 100"),
    "bytes that are no message": (
        answering(framed(b"\xff" * 9), trailers=OK),
        "INTERNAL",
        "no GenerateResponse",
    ),
    "an end amid a message": (
        answering(framed(b"abc", length=9), ends=True),
        "UNAVAILABLE",
        "inside a message",
    ),
    "trailers amid a message": (answering(b"\0\0", trailers=OK), "UNAVAILABLE", "inside a message"),
    "no trailers": (answering(framed(b""), ends=True), "UNKNOWN", "without a status"),
    "headers that are the end": (answering(ends=True), "UNKNOWN", "without a status"),
    "trailers without a status": (answering(trailers=[("x-a", "b")]), "UNKNOWN", "grpc-status"),
    "a status that is no number": (answering(trailers=[("grpc-status", "fine")]), "UNKNOWN", "'fine'"),
    "a status that nobody knows": (answering(trailers=[("grpc-status", "99")]), "UNKNOWN", "'99'"),
    "such a status amid a message": (answering(b"\0", trailers=[("grpc-status", "99")]), "UNKNOWN", "'99'"),
    "the headers of a web page": (
        answering(b"<html>", headers=[STATUS, ("content-type", "text/html")], ends=True),
        "UNKNOWN",
        "text/html",
    ),
    "a gateway's error": (
        answering(b"<html>", headers=[(":status", "502")], ends=True),
        "UNAVAILABLE",
        "502",
    ),
    "headers without :status": (answering(headers=[TYPE]), "INTERNAL", ":status"),
    "a :status that is none": (answering(headers=[(":status", "ok"), TYPE]), "INTERNAL", ":status"),
    "data without headers": (
        lambda connection, stream_id: connection.send_data(stream_id, b"a", end_stream=True),
        "INTERNAL",
        "HTTP/2",
    ),
    "a reset": (resetting(ErrorCodes.INTERNAL_ERROR), "UNAVAILABLE", "INTERNAL_ERROR"),
    "a reset after a message": (
        resetting(ErrorCodes.REFUSED_STREAM, framed(b"")),
        "UNAVAILABLE",
        "REFUSED_STREAM",
    ),
    "a reset of no known code": (resetting(77), "UNAVAILABLE", "77"),
    "metadata that is no base64": (
        answering(headers=[STATUS, TYPE, ("a-bin", "!")], trailers=[("grpc-status", "5"), ("b-bin", "!")]),
        "NOT_FOUND",
        "",
    ),
    "details that are none": (
        answering(trailers=[("grpc-status", "5"), ("grpc-status-details-bin", "AAAA")]),
        "NOT_FOUND",
        "",
    ),
    "text that is no ASCII": (
        answering(
            headers=[STATUS, TYPE, ("x-a", "é")], trailers=[("grpc-status", "5"), ("grpc-message", "né")]
        ),
        "NOT_FOUND",
        "né",
    ),
    "long trailers": (answering(trailers=[("grpc-status", "5"), *PADDED * 4]), "NOT_FOUND", ""),
}


@asynccontextmanager
async def connected(scripted, answer, **options):
    """A client with a stream of events that is open and goes on after the test's own calls, on one connection."""
    server = scripted({GENERATE: answer, EVENTS: answering(framed(BATCH))})
    async with server.running() as address, Client(address, **options) as client, asyncio.timeout(20):
        events = client.kv_events()
        assert (await anext(events)).sequence_number == 7
        yield client, server
        server.say(EVENTS, lambda connection, stream_id: connection.send_data(stream_id, framed(BATCH)))
        assert (await anext(events)).sequence_number == 7
        await client.get_model()
        assert server.num_connections == 1
        await events.aclose()


@pytest.mark.parametrize(("answer", "status", "words"), BAD.values(), ids=BAD)
async def test_a_bad_answer_ends_its_own_call(scripted, answer, status, words):
    async with connected(scripted, answer) as (client, _):
        with pytest.raises(ServiceError) as failure:
            async for _ in client.generate([5]):
                pass
        assert failure.value.status == status, str(failure.value)
        assert words in str(failure.value)


def begun(connection, stream_id):
    answering()(connection, stream_id)


async def test_headers_and_then_nothing_last_until_the_deadline(scripted):
    async with connected(scripted, begun) as (client, server):
        with pytest.raises(TimeoutError):
            await anext(client.generate([5], timeout_seconds=0.1))
        await server.until(lambda: server.resets)


async def test_a_message_that_stops_amid_lasts_until_the_deadline(scripted):
    async with connected(scripted, answering(framed(b"a", length=9))) as (client, _):
        with pytest.raises(TimeoutError):
            await anext(client.generate([5], timeout_seconds=0.1))


@pytest.mark.parametrize("answer", [begun, resetting(ErrorCodes.CANCEL)])
async def test_a_call_that_failed_leaves_its_tasks_own_timeouts_as_they_were(scripted, answer):
    async with connected(scripted, answer) as (client, _):
        with pytest.raises((TimeoutError, ServiceError)):
            await anext(client.generate([5], timeout_seconds=0.1))
        assert asyncio.current_task().cancelling() == 0


async def test_a_message_of_the_largest_size_is_taken_and_a_larger_one_refused_before_it_comes(scripted):
    """The largest is several times the window."""
    most = 4 * STREAM_WINDOW_BYTES
    text = "a" * (most - 20)
    message = pb.GenerateResponse(deltas=[pb.Delta(text=text)])
    message.request_id = "b" * (most - message.ByteSize() - 2)
    assert message.ByteSize() == most
    async with connected(scripted, begun, max_message_bytes=most) as (client, server):
        stream = client.generate([5])
        first = asyncio.ensure_future(anext(stream))
        await server.until(lambda: GENERATE in server.calls)
        await server.send(GENERATE, framed(message))
        assert (await first).text == text
        server.say(
            GENERATE,
            lambda connection, stream_id: connection.send_data(stream_id, framed(b"", length=most + 1)),
        )
        with pytest.raises(
            ServiceError, match=f"a message of {most + 1} bytes: allowed is max_message_bytes, {most}$"
        ):
            await anext(stream)
        await server.until(lambda: server.resets)


async def test_calls_that_are_not_read_buffer_a_window_each_and_hold_up_no_other(scripted):
    """Together they have more unread than the connection's window is."""
    message = framed(pb.GenerateResponse(deltas=[pb.Delta(text="a" * 1000)]))
    num_messages = STREAM_WINDOW_BYTES // len(message)
    async with connected(scripted, begun) as (client, server):
        streams = []
        for _ in range(20):
            server.calls.pop(GENERATE, None)
            streams.append(client.generate([5]))
            first = asyncio.ensure_future(anext(streams[-1]))
            await server.until(lambda: GENERATE in server.calls)
            await server.send(GENERATE, message * num_messages)
            await first
            await client.get_model()
        connection, _, stream_id = server.calls[GENERATE]
        for _ in range(num_messages // 8):
            await anext(streams[-1])
        await client.get_model()
        assert connection.local_flow_control_window(stream_id) < STREAM_WINDOW_BYTES // 4
        for stream in streams:
            await stream.aclose()


async def test_frames_that_carry_nothing_are_no_end(scripted):
    """An empty frame of data amid a message, frames of extensions, and headers before the headers."""

    def answer(connection, stream_id):
        connection.send_headers(stream_id, [(":status", "103"), ("link", "a")])
        begun(connection, stream_id)
        connection.send_data(stream_id, message[:3])
        unknown = b"\0\0\3\xbe\0\0\0\0\0abc"
        return DataFrame(stream_id).serialize() + unknown + AltSvcFrame(stream_id, b"", b"h2").serialize()

    message = framed(pb.GenerateResponse(deltas=[pb.Delta(text="a")]))
    async with connected(scripted, answer) as (client, server):
        first = asyncio.ensure_future(anext(client.generate([5])))
        await server.until(lambda: GENERATE in server.calls)
        server.say(GENERATE, answering(message[3:], headers=(), trailers=OK))
        assert (await first).text == "a"


def goaway(code, said=b""):
    return lambda connection, stream_id: GoAwayFrame(0, stream_id, code, said).serialize()


def fields(block):
    """Headers of these bytes, in as many frames as they need."""

    def answer(connection, stream_id):
        parts = [block[start : start + 16_384] for start in range(0, len(block), 16_384)]
        frames = [HeadersFrame(stream_id, parts[0])] + [
            ContinuationFrame(stream_id, part) for part in parts[1:]
        ]
        frames[-1].flags.add("END_HEADERS")
        return b"".join(frame.serialize() for frame in frames)

    return answer


def promising(connection, stream_id):
    promise = PushPromiseFrame(stream_id, 2, Encoder().encode([(":method", "GET")]))
    promise.flags.add("END_HEADERS")
    return promise.serialize()


FATAL = {
    "a block of headers of 80 KiB": (fields(b"\0" * 81_920), "block of 81920 bytes: allowed is 65536"),
    "a small block of large headers": (
        fields(Encoder().encode([("x-a", "a" * 4000)]) + b"\xbe" * 100),
        "HTTP/2: ",
    ),
    "headers that cannot be decoded": (fields(b"\xff" * 20), "HTTP/2: "),
    "a frame of 16 MiB": (lambda connection, stream_id: b"\xff\xff\xff\0\0\0\0\0\1", "HTTP/2: .*16777215"),
    "a promise": (promising, "HTTP/2: .*[Pp]ush"),
    "a call that the server begins": (
        lambda connection, stream_id: fields(b"\x88")(connection, 2),
        "HTTP/2: ",
    ),
    "a goodbye with an error": (
        goaway(ErrorCodes.INTERNAL_ERROR, b"no\nmore"),
        r"INTERNAL_ERROR, b'no\\nmore'$",
    ),
    "a goodbye of no known code": (goaway(77), "error code 77$"),
}


@pytest.mark.parametrize(("answer", "words"), FATAL.values(), ids=FATAL)
async def test_what_only_the_end_of_a_connection_can_answer_ends_its_calls_and_the_next_makes_a_new_one(
    scripted, answer, words
):
    server = scripted({GENERATE: answer, EVENTS: answering(framed(BATCH))})
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        events = client.kv_events()
        await anext(events)
        for call in (client.generate([5]), events):
            with pytest.raises(ServiceError, match=f"^UNAVAILABLE: the server .*{words}"):
                await anext(call)
        await client.get_model()
        assert server.num_connections == 2


async def test_a_server_that_asks_for_answers_and_reads_none_is_left(scripted, monkeypatch):
    monkeypatch.setattr(client_events, "MAX_UNSENT_BYTES", 2**16)

    def bounded(transport, option):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 4096)
        return transport

    def answer(connection, stream_id):
        bounded(server.calls[GENERATE][1].transport, socket.SO_RCVBUF).pause_reading()
        return PingFrame(0, b"12345678").serialize() * 2**14

    server = scripted({GENERATE: answer})
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        await client.get_model()
        bounded(client._channel._protocol.connection._transport, socket.SO_SNDBUF)
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: the server asks for answers and reads none$"):
            await anext(client.generate([5]))
        await client.get_model()
        assert server.num_connections == 2


async def test_a_call_goes_on_after_the_servers_goodbye_and_one_that_it_did_not_begin_says_so(scripted):
    batch = lambda connection, stream_id: connection.send_data(stream_id, framed(BATCH))  # noqa: E731
    last = lambda connection, stream_id: GoAwayFrame(0, stream_id - 2).serialize()  # noqa: E731
    server = scripted({GENERATE: last, EVENTS: answering(framed(BATCH))})
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        events = client.kv_events()
        await anext(events)
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: .*did not begin the call$"):
            await anext(client.generate([5]))
        await client.get_model()
        assert server.num_connections == 2
        server.say(EVENTS, batch, answering(headers=(), trailers=OK))
        assert [batch.sequence_number async for batch in events] == [7]


@pytest.mark.parametrize("value", [0, -1, 2**32, 1.5, True, "1", None])
async def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"^max_message_bytes is .*: allowed is an integer from 1 to 4294967295$"
    ):
        Client(max_message_bytes=value)


async def test_the_longest_batch_of_events_fits():
    key = bytes(32)
    event = pb.KvEvent(
        stored=pb.KvBlockStored(key=key, parent_key=key, is_first=False, token_ids=[200_000] * 256)
    )
    num_bytes = pb.KvEventBatch(events=[event]).ByteSize()
    assert num_bytes * 2**16 <= DEFAULT_MAX_MESSAGE_BYTES
