"""A client that says goodbye (GOAWAY) gets what it has asked for, and then the end of its connection."""

import asyncio

import h2.errors
import h2.events
import pytest
from hyperframe.frame import GoAwayFrame

from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport.goaway import goaway

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT = 3


def asking(num_tokens):
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)


async def ended(connection):
    """The id of the last call that the server served, once it has closed the connection."""
    event = await connection.wait_for(h2.events.ConnectionTerminated)
    assert event.error_code == h2.errors.ErrorCodes.NO_ERROR
    with pytest.raises(ConnectionError):
        await connection.wait_for(h2.events.ConnectionTerminated)
    return event.last_stream_id


async def ping(connection):
    connection.h2.ping(b"12345678")
    await connection.flush()
    await connection.wait_for(h2.events.PingAckReceived)


async def test_calls_go_on_after_the_clients_goodbye_and_the_connection_ends_with_the_last(
    raw, framed, engine, daemon
):
    engine.hold()
    calls = [raw.request(GENERATE, framed(asking(num_tokens))) for num_tokens in (1, 40)]
    await raw.flush()
    await engine.until(lambda: len(engine.live) == 2)
    raw.writer.write(goaway(0))
    await ping(raw)
    assert len(engine.live) == 2
    engine.release()
    assert [(await raw.status(call))[0] for call in calls] == [0, 0]
    assert await ended(raw) == calls[-1]
    assert len(engine.finished) == 2
    assert not engine.aborted
    assert daemon.daemon._server.num_connections == 0


async def test_a_call_whose_client_reads_on_only_after_its_goodbye_comes_whole(open_raw, framed, engine):
    connection = await open_raw(initial_window=100)
    stream_id = connection.request(GENERATE, framed(asking(1000)))
    await connection.flush()
    connection.writer.write(goaway(0))
    await engine.until(lambda: engine.finished)
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    assert await ended(connection) == stream_id
    await connection.close()


async def test_without_calls_the_goodbye_is_answered_at_once(raw):
    raw.writer.write(goaway(0))
    async with asyncio.timeout(10):
        assert await ended(raw) == 0


async def test_a_call_that_is_refused_with_the_goodbye_is_answered(raw):
    """It has no task that could keep the connection open."""
    refused = raw.h2.get_next_available_stream_id()
    headers = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "test", "x-bin": "A"}
    raw.h2.send_headers(refused, list(headers.items()), end_stream=True)
    raw.writer.write(raw.h2.data_to_send() + goaway(0))
    assert (await raw.status(refused))[0] == INVALID_ARGUMENT
    assert await ended(raw) == refused


async def test_a_goodbye_because_of_an_error_ends_the_calls(raw, framed, engine):
    engine.hold()
    raw.request(GENERATE, framed(asking(40)))
    await raw.flush()
    await engine.until(lambda: engine.live)
    raw.writer.write(goaway(0, h2.errors.ErrorCodes.INTERNAL_ERROR))
    await engine.until(lambda: engine.aborted)


async def test_goodbyes_of_both_sides_name_no_call_that_was_refused(start_daemon, open_raw, framed):
    daemon = await start_daemon(drain_timeout=20.0)
    connection = await open_raw(address=daemon.address)
    connection.h2._frame_dispatch_table[GoAwayFrame] = lambda frame: ([], [frame])  # h2 would close
    daemon.engine.hold()
    served = connection.request(GENERATE, framed(asking(3)))
    await connection.flush()
    await daemon.engine.until(lambda: daemon.engine.live)
    stopping = asyncio.create_task(daemon.stop())
    assert [(await connection.wait_for(GoAwayFrame)).last_stream_id for _ in range(2)] == [2**31 - 1, served]
    refused = connection.request(GENERATE, framed(asking(3)))
    await connection.flush()
    await connection.wait_for(h2.events.StreamReset, refused)
    connection.writer.write(goaway(0))
    await connection.writer.drain()
    daemon.engine.release()
    assert (await connection.status(served))[0] == 0
    assert (await connection.wait_for(GoAwayFrame)).last_stream_id == served
    await stopping
    await connection.close()
