"""What one call may not say ends that call alone; what cannot be HTTP/2 ends its connection, with a word why."""

import asyncio

import h2.errors
import h2.events
import pytest
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from h2.settings import SettingCodes
from hpack import Encoder

from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import Offence
from pykv.service.transport.events import CallEvents

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
USUAL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", GENERATE),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=2))
OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL = 0, 3, 4, 12, 13
DATA, HEADERS, PRIORITY, WINDOW_UPDATE = 0, 1, 2, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind, flags, stream_id, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload


def headers(stream_id, fields, flags=END_HEADERS):
    return frame(HEADERS, flags, stream_id, Encoder().encode(fields, huffman=False))


@pytest.fixture
def call(framed):
    """A call in bytes, with further header fields: `call(stream_id, fields)`."""

    def made(stream_id, fields=(), usual=USUAL):
        return headers(stream_id, [*usual, *fields]) + frame(DATA, END_STREAM, stream_id, framed(REQUEST))

    return made


async def neighbour_of(raw, framed):
    """Begins call 1, which waits for its message, and has the client know of calls 3 and 5."""
    assert raw.request(GENERATE, end_stream=False) == 1
    await raw.flush()
    for _ in range(2):
        raw.request(GENERATE, end_stream=False)
    raw.h2.data_to_send()  # not sent: the test says it in other words

    async def ends_well():
        raw.h2.send_data(1, framed(REQUEST), end_stream=True)
        await raw.flush()
        assert (await raw.status(1))[0] == OK

    return ends_well


def complaints(caplog):
    return [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


FORBIDDEN = {
    "an upper-case name": [*USUAL, ("X-Up", "a")],
    "an empty name": [*USUAL, ("", "a")],
    "a name with a space": [*USUAL, ("a b", "a")],
    "a header of one connection": [*USUAL, ("connection", "close")],
    "an unknown pseudo-header": [(":unknown", "a"), *USUAL],
    "a pseudo-header twice": [*USUAL[:3], (":path", CHECK), *USUAL[3:]],
    "a pseudo-header that comes late": [*USUAL[1:], USUAL[0]],
    "an answer's pseudo-header": [(":status", "100"), *USUAL],
    "NUL in a value": [*USUAL, ("x", "a\0b")],
    "a line's end in a value": [*USUAL, ("x", "a\r\nb: c")],
    "a length that is none": [*USUAL, ("content-length", "abc")],
    "a negative length": [*USUAL, ("content-length", "-1")],
    "a length of 5,000 digits": [*USUAL, ("content-length", "9" * 5000)],
    "a length that is too short": [*USUAL, ("content-length", "3")],
}


@pytest.mark.parametrize("fields", FORBIDDEN.values(), ids=FORBIDDEN)
async def test_headers_that_http_forbids_reset_their_stream_alone(raw, framed, call, fields, caplog):
    ends_well = await neighbour_of(raw, framed)
    raw.writer.write(call(3, usual=fields))
    reset = await raw.wait_for(h2.events.StreamReset, 3)
    assert reset.error_code == h2.errors.ErrorCodes.PROTOCOL_ERROR
    await ends_well()
    assert not complaints(caplog)


FAULTY_FRAMES = {
    "trailers without an end": headers(3, [("x", "1")]),
    "trailers with a pseudo-header": headers(3, [(":path", "1")], END_HEADERS | END_STREAM),
    "a window opened by 0": frame(WINDOW_UPDATE, 0, 3, bytes(4)),
    "a stream that depends on itself": frame(PRIORITY, 0, 3, b"\0\0\0\3\0"),
}


@pytest.mark.parametrize("faulty", FAULTY_FRAMES.values(), ids=FAULTY_FRAMES)
async def test_frames_that_are_an_error_of_their_stream_reset_it_alone(raw, framed, faulty, caplog):
    ends_well = await neighbour_of(raw, framed)
    raw.writer.write(headers(3, USUAL) + frame(DATA, 0, 3, framed(REQUEST)) + faulty)
    reset = await raw.wait_for(h2.events.StreamReset, 3)
    assert reset.error_code == h2.errors.ErrorCodes.PROTOCOL_ERROR
    await ends_well()
    assert not complaints(caplog)


async def test_a_stream_beyond_the_announced_number_is_refused_alone(start_daemon, raw_open, framed):
    raw = await raw_open((await start_daemon(max_streams=2)).address)
    raw.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 100
    raw.h2.remote_settings.acknowledge()  # a client that does not heed what it was told
    ends_well = await neighbour_of(raw, framed)
    raw.writer.write(headers(3, USUAL) + headers(5, [*USUAL, ("x-new-in-the-table", "1")]))
    reset = await raw.wait_for(h2.events.StreamReset, 5)
    assert reset.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
    await ends_well()
    await raw.close()


TIMEOUTS = ["9" * 400 + "m", "9" * 5000 + "S", "123456789S", "", "1", "-1S", "1x", " 1S", "1 S"]


@pytest.mark.parametrize("limit", TIMEOUTS, ids=lambda limit: repr(limit[:12]))
async def test_a_malformed_timeout_is_refused_and_touches_no_other_call(raw, framed, call, limit, caplog):
    ends_well = await neighbour_of(raw, framed)
    raw.writer.write(call(3, [("grpc-timeout", limit)]) + call(5))
    status, message = await raw.status(3)
    assert (status, "grpc-timeout" in message) == (INVALID_ARGUMENT, True)
    assert (await raw.status(5))[0] == OK
    await ends_well()
    assert not complaints(caplog)


@pytest.mark.parametrize(("limit", "status"), [("99999999H", OK), ("0n", DEADLINE_EXCEEDED)])
async def test_the_shortest_and_the_longest_timeout_are_heeded(raw, framed, call, limit, status):
    await neighbour_of(raw, framed)
    raw.writer.write(call(3, [("grpc-timeout", limit)]))
    assert (await raw.status(3))[0] == status


async def test_two_credentials_are_refused(raw, framed, call):
    ends_well = await neighbour_of(raw, framed)
    raw.writer.write(call(3, [("authorization", "Bearer a"), ("authorization", "Bearer b")]))
    status, message = await raw.status(3)
    assert (status, "'authorization' is there 2 times" in message) == (INVALID_ARGUMENT, True)
    await ends_well()


@pytest.mark.parametrize("path", [CHECK, WATCH, GENERATE, "/pykv.v1.Engine/GetModel"])
@pytest.mark.parametrize("end", [b"", frame(DATA, END_STREAM, 3)], ids=["headers", "data"])
async def test_a_call_without_a_message_is_refused_without_a_complaint(raw, framed, path, end, caplog):
    ends_well = await neighbour_of(raw, framed)
    fields = [(name, path if name == ":path" else value) for name, value in USUAL]
    raw.writer.write(headers(3, fields, END_HEADERS | (0 if end else END_STREAM)) + end)
    status, message = await raw.status(3)
    assert (status, message) == (INVALID_ARGUMENT, "the call has no request message: allowed is one")
    await ends_well()
    assert not complaints(caplog)


async def test_an_empty_message_is_one(raw, framed):
    stream_id = raw.request(CHECK, framed(HealthCheckRequest()))
    await raw.flush()
    assert (await raw.status(stream_id))[0] == OK


async def test_an_exception_at_one_calls_headers_ends_that_call_alone(raw, framed, call, monkeypatch, caplog):
    ends_well = await neighbour_of(raw, framed)
    accept = CallEvents.create_call

    def fail(self, event):
        if event.stream_id == 3:
            raise OverflowError("cannot be held")
        accept(self, event)

    monkeypatch.setattr(CallEvents, "create_call", fail)
    raw.writer.write(call(3) + call(5))
    reset = await raw.wait_for(h2.events.StreamReset, 3)
    assert reset.error_code == h2.errors.ErrorCodes.INTERNAL_ERROR
    assert (await raw.status(5))[0] == OK
    await ends_well()
    assert [record.getMessage() for record in complaints(caplog)] == ["stream failed"]


NO_HTTP2 = {
    "data on a stream that never was": (frame(DATA, 0, 99, b"x"), 1),
    "settings of five bytes": (frame(4, 0, 0, b"\0\4\0\0\0"), 6),
    "a window that is too large": (frame(4, 0, 0, b"\0\4\xff\xff\xff\xff"), 3),
    "headers that no table explains": (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\x0f"), 9),
}


@pytest.mark.parametrize(("broken", "code"), NO_HTTP2.values(), ids=NO_HTTP2)
async def test_an_error_of_the_connection_is_told_to_client_and_operator(daemon, raw, broken, code, caplog):
    raw.writer.write(broken)
    goodbye = await raw.wait_for(h2.events.ConnectionTerminated)
    assert (goodbye.error_code, goodbye.additional_data.decode()) == (code, Offence.PROTOCOL.value)
    async with asyncio.timeout(20):
        assert await raw.reader.read() == b""
    assert daemon.daemon._server.num_closed == {Offence.PROTOCOL: 1}
    (record,) = complaints(caplog)
    assert (record.getMessage(), record.reason) == ("connection closed", Offence.PROTOCOL.value)
