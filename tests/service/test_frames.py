"""Frames that HTTP/2 forbids end their connection, by the right code and before their payload is buffered."""

import asyncio

import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.exceptions import DenialOfServiceError, FrameTooLargeError
from hpack import Encoder

from pykv.client import Client, ServiceError
from pykv.service.frame_buffer import MAX_BLOCK_BYTES, CheckedFrameBuffer
from pykv.service.protocol import engine_pb2 as pb

GENERATE = "/pykv.v1.Engine/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 6, 7, 8, 9
ACK, END_HEADERS = 1, 4
MAX_FRAME_BYTES = 2**14
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", GENERATE),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def header(kind, flags, stream_id, length):
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big")


def frame(kind, flags, stream_id, payload=b""):
    return header(kind, flags, stream_id, len(payload)) + payload


def begun():
    """A buffer of a connection that has begun."""
    buffer = CheckedFrameBuffer()
    buffer.max_frame_size = MAX_FRAME_BYTES
    buffer.add_data(frame(SETTINGS, 0, 0))
    next(buffer)
    return buffer


TOO_LONG = {
    "data": header(DATA, 0, 1, MAX_FRAME_BYTES + 1),
    "an unknown frame": header(0xBE, 0, 0, 2**24 - 1),
    "an acknowledgement": header(SETTINGS, ACK, 0, 6),
}


@pytest.mark.parametrize("sent", TOO_LONG.values(), ids=TOO_LONG)
def test_a_frame_that_is_too_long_is_refused_by_its_header(sent):
    buffer = begun()
    buffer.add_data(sent[:8])
    assert not list(buffer)
    buffer.add_data(sent[8:])
    with pytest.raises(FrameTooLargeError):
        next(buffer)


def test_a_frame_of_the_largest_size_is_given_out_once_it_is_there():
    buffer = begun()
    sent = frame(DATA, 0, 1, bytes(MAX_FRAME_BYTES))
    buffer.add_data(sent[:-1])
    assert not list(buffer)
    buffer.add_data(sent[-1:])
    assert [len(received.data) for received in buffer] == [MAX_FRAME_BYTES]


def test_a_block_of_headers_that_is_too_long_is_refused_before_its_end():
    buffer = begun()
    part = bytes(MAX_FRAME_BYTES)
    buffer.add_data(frame(HEADERS, 0, 1, part) + frame(CONTINUATION, 0, 1, part) * 2)
    assert not list(buffer)
    last = frame(CONTINUATION, END_HEADERS, 1, part)
    assert 4 * len(part) == MAX_BLOCK_BYTES
    buffer.add_data(last[:-1])
    assert not list(buffer)
    buffer.add_data(last[-1:] + frame(HEADERS, 0, 3, part) + frame(CONTINUATION, 0, 3, part) * 3)
    assert [len(received.data) for received in buffer] == [MAX_BLOCK_BYTES]
    buffer.add_data(header(CONTINUATION, 0, 3, 1))
    with pytest.raises(DenialOfServiceError):
        next(buffer)


def test_the_reserved_bit_of_a_number_is_ignored():
    buffer = begun()
    buffer.add_data(frame(WINDOW_UPDATE, 0, 1, b"\x80\0\0\1") + frame(GOAWAY, 0, 0, b"\x80\0\0\3" + bytes(4)))
    update, goodbye = buffer
    assert (update.window_increment, goodbye.last_stream_id) == (1, 3)


FORBIDDEN = {
    "a frame of 16 MiB": (header(DATA, 0, 1, 2**24 - 1), ErrorCodes.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (
        frame(SETTINGS, ACK, 0, b"\0\4\0\0\0\1"),
        ErrorCodes.FRAME_SIZE_ERROR,
    ),
    "a short ping": (frame(PING, 0, 0, bytes(7)), ErrorCodes.FRAME_SIZE_ERROR),
    "a window that overflows": (
        frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2,
        ErrorCodes.FLOW_CONTROL_ERROR,
    ),
    "a field of no index": (frame(HEADERS, END_HEADERS, 1, b"\x80"), ErrorCodes.COMPRESSION_ERROR),
    "an index beyond the table": (frame(HEADERS, END_HEADERS, 1, b"\xc6"), ErrorCodes.COMPRESSION_ERROR),
    "an index without an end": (
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 200 + b"\1"),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "a text that is cut": (
        frame(HEADERS, END_HEADERS, 1, b"\0\x7f\xff\xff\xff\x7fab"),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "a table that is too large": (
        frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\xff\x7f"),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "a wrong code of a text": (
        frame(HEADERS, END_HEADERS, 1, b"\0\x84\xff\xff\xff\xff\1a"),
        ErrorCodes.COMPRESSION_ERROR,
    ),
    "fields beyond all bounds": (
        frame(HEADERS, END_HEADERS, 1, b"\x8f" * 2000),
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("sent", "code"), FORBIDDEN.values(), ids=FORBIDDEN)
async def test_a_connection_ends_with_the_code_of_what_was_wrong(raw, client, sent, code):
    raw.writer.write(sent)
    assert (await raw.wait_for(h2.events.ConnectionTerminated)).error_code == code
    assert await client.health() == "SERVING"


FIRST_FRAMES = {
    "a call": frame(HEADERS, END_HEADERS, 1, Encoder().encode(CALL)),
    "an acknowledgement": frame(SETTINGS, ACK, 0),
    "a frame of 16 MiB": header(DATA, 0, 1, 2**24 - 1),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("first", FIRST_FRAMES.values(), ids=FIRST_FRAMES)
async def test_a_connection_begins_with_settings(daemon, first):
    host, port = daemon.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + first)
    async with asyncio.timeout(20):
        received = await reader.read()
        writer.close()
        await writer.wait_closed()
    goodbye = received.index(header(GOAWAY, 0, 0, 0)[3:])
    assert int.from_bytes(received[goodbye + 10 : goodbye + 14], "big") == ErrorCodes.PROTOCOL_ERROR


@pytest.mark.asyncio
async def test_a_window_is_opened_whatever_the_reserved_bit(raw, framed):
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=1))
    stream_id = raw.request(GENERATE, end_stream=False)
    await raw.flush()
    raw.writer.write(frame(WINDOW_UPDATE, 0, stream_id, b"\x80\0\0\1"))
    raw.h2.send_data(stream_id, framed(request), end_stream=True)
    await raw.flush()
    assert (await raw.status(stream_id))[0] == 0


@pytest.mark.asyncio
async def test_the_client_leaves_a_server_whose_frame_is_too_long():
    was_left = asyncio.Event()

    async def serve(reader, writer):
        await reader.read(1)
        writer.write(frame(SETTINGS, 0, 0) + header(DATA, 0, 1, 2**24 - 1))
        await reader.read()
        writer.close()
        await writer.wait_closed()
        was_left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with Client("{}:{}".format(*server.sockets[0].getsockname())) as client, asyncio.timeout(20):
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            await client.health()
        await was_left.wait()
    server.close()
