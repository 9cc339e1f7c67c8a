"""Whatever ends a call, the request in the engine ends with it, and nothing is left behind."""

import asyncio
import gc

import pytest

from pykv.client import Client, ServiceError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
DEADLINE_EXCEEDED = 4
LONG = SamplingParams(max_tokens=100_000)


def endless(prompt=5):
    sampling = pb.SamplingParams(max_tokens=100_000)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[prompt]), sampling=sampling)


async def gone(engine, count=1):
    await engine.until(lambda: not engine.live and len(engine.aborted) == count)


async def leave_by_break(stream):
    async for _ in stream:
        break
    await stream.aclose()


async def leave_by_cancel(stream):
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leave_by_exception(stream):
    try:
        async for _ in stream:
            raise ZeroDivisionError
    except ZeroDivisionError:
        await stream.aclose()


async def leave_by_dropping(stream):
    await anext(stream)
    del stream
    gc.collect()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception])
async def test_leaving_the_iterator_ends_the_request(client, engine, leave):
    await leave(client.generate([5], LONG))
    await gone(engine)


async def test_dropping_the_iterator_ends_the_request(client, engine):
    await leave_by_dropping(client.generate([5], LONG))
    await gone(engine)


async def test_cancelling_the_task_that_waits_ends_the_request(client, engine):
    engine.hold()
    task = asyncio.create_task(anext(client.generate([5], LONG)))
    await engine.until(lambda: engine.live)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await gone(engine)


async def test_a_wrapper_around_the_iterator_passes_its_end_on(client, engine):
    async def words():
        stream = client.generate([5], LONG)
        try:
            async for delta in stream:
                yield delta.text
        finally:
            await stream.aclose()

    wrapped = words()
    await anext(wrapped)
    await wrapped.aclose()
    await gone(engine)


async def test_closing_the_client_ends_its_requests(daemon, engine):
    client = Client(daemon.address)
    streams = [client.generate([5], LONG) for _ in range(5)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    await client.aclose()
    await gone(engine, 5)
    for stream in streams:
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            await anext(stream)


@pytest.mark.parametrize("moment", ["with the request", "before the first token", "in mid-stream"])
async def test_a_reset_ends_the_request(raw, framed, engine, moment):
    if moment == "before the first token":
        engine.hold()
    stream_id = raw.request(GENERATE, framed(endless()))
    if moment != "with the request":
        await raw.flush()
        await engine.until(lambda: engine.live)
    raw.h2.reset_stream(stream_id)
    await raw.flush()
    if moment == "with the request":
        await engine_idle(raw, engine)
    else:
        await gone(engine)


async def engine_idle(raw, engine):
    """After a ping came back, all that was sent before it was seen."""
    await ping(raw)
    await engine.until(lambda: not engine.live)


async def ping(raw):
    import h2.events

    raw.h2.ping(b"12345678")
    await raw.flush()
    await raw.wait_for(h2.events.PingAckReceived)


@pytest.mark.parametrize("way", ["close", "abort"])
async def test_a_lost_connection_ends_all_its_requests(open_raw, framed, engine, way):
    connection = await open_raw()
    for place in range(20):
        connection.request(GENERATE, framed(endless(place)))
    await connection.flush()
    await engine.until(lambda: len(engine.live) == 20)
    if way == "close":
        await connection.close()
    else:
        connection.abort()
    await gone(engine, 20)


async def test_a_deadline_ends_the_request_with_its_status(raw, framed, engine):
    stream_id = raw.request(GENERATE, framed(endless()), timeout="100m")
    await raw.flush()
    assert (await raw.status(stream_id))[0] == DEADLINE_EXCEEDED
    await gone(engine)


async def test_a_deadline_that_has_passed_has_its_status(raw, framed, engine):
    stream_id = raw.request(GENERATE, framed(endless()), timeout="0n")
    await raw.flush()
    assert (await raw.status(stream_id))[0] == DEADLINE_EXCEEDED
    assert not engine.live


async def test_the_clients_own_deadline_raises_timeout(client, engine):
    engine.hold()
    with pytest.raises(TimeoutError):
        await anext(client.generate([5], LONG, timeout_seconds=0.1))
    await gone(engine)


async def test_a_finished_request_is_not_aborted(client, engine, collect):
    await collect(client.generate([5], SamplingParams(max_tokens=5)))
    assert (len(engine.finished), engine.aborted) == (1, [])


async def test_a_thousand_ways_out_leave_no_request_no_call_and_no_stream(daemon, engine, open_raw, framed):
    for _ in range(10):
        connection = await open_raw()
        for place in range(100):
            stream_id = connection.request(GENERATE, framed(endless(place)))
            if place % 3 == 0:
                connection.h2.reset_stream(stream_id)
            elif place % 3 == 1:
                await connection.flush()
        await connection.flush()
        connection.abort()
    await engine.until(lambda: not engine.live)
    async with Client(daemon.address) as client:
        await client.health()
        assert len(daemon.daemon._calls) == 0
        assert daemon.daemon._server.num_connections == 1
