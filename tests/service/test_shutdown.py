"""The end is orderly: calls in flight go on for a while, and everything ends in bounded time."""

import asyncio
import os
import signal

import h2.errors
import h2.events
import pytest

from pykv.client import Client, ServiceError
from pykv.sampling import SamplingParams
from pykv.service import daemon as daemon_module
from pykv.service import shutdown
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.status import innermost

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
LONG = SamplingParams(max_tokens=100_000)


def asking(num_tokens):
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)


async def test_a_call_in_flight_ends_whole_during_the_drain(start_daemon):
    daemon = await start_daemon(drain_timeout=20.0)
    async with Client(daemon.address) as client:
        stream = client.generate([5], SamplingParams(max_tokens=50))
        seen = list((await anext(stream)).token_ids)
        daemon.engine.hold()
        stopping = asyncio.create_task(daemon.stop())
        await asyncio.sleep(0.3)  # past both goodbyes
        daemon.engine.release()
        seen += [token async for delta in stream for token in delta.token_ids]
        assert seen == list(range(6, 56))
        await stopping


async def test_calls_that_outlive_the_grace_end_with_unavailable(start_daemon):
    daemon = await start_daemon(drain_timeout=0.2)
    async with Client(daemon.address) as client:
        stream = client.generate([5], LONG)
        await anext(stream)
        daemon.engine.hold()
        stopping = asyncio.create_task(daemon.stop())
        with pytest.raises(ServiceError, match="shutting down") as failure:
            [delta async for delta in stream]
        assert failure.value.status == "UNAVAILABLE"
        await stopping
        assert daemon.engine.aborted


async def test_when_a_part_of_the_daemon_fails_calls_end_with_unavailable_and_not_as_if_aborted(
    start_daemon, make_real_engine, monkeypatch
):
    failing = asyncio.Event()

    async def fail(*_):
        await failing.wait()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(daemon_module, "watch_engine", fail)
    daemon = await start_daemon(make_real_engine())
    async with Client(daemon.address) as client:
        stream = client.generate([5], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)
        failing.set()
        with pytest.raises(ServiceError, match="shutting down") as failure:
            [delta async for delta in stream]
        assert failure.value.status == "UNAVAILABLE"
    with pytest.raises(ExceptionGroup) as raised:
        await daemon.task
    assert isinstance(innermost(raised.value), ZeroDivisionError)
    daemon.task = asyncio.create_task(asyncio.sleep(0))  # nothing is left to stop


async def test_a_second_request_hurries_the_end(start_daemon):
    daemon = await start_daemon(drain_timeout=1000.0)
    async with Client(daemon.address) as client:
        stream = client.generate([5], LONG)
        await anext(stream)
        daemon.engine.hold()
        daemon.daemon.request_shutdown()
        await asyncio.sleep(0)
        await daemon.stop()


async def test_clients_are_told_twice_and_calls_after_the_last_are_refused(
    start_daemon, open_raw, framed, monkeypatch
):
    monkeypatch.setattr(
        shutdown, "GOAWAY_SECONDS", 1.0
    )  # the second call comes in time on a busy machine, too
    daemon = await start_daemon(drain_timeout=20.0)
    connection = await open_raw(address=daemon.address)
    connection.h2._frame_dispatch_table[goaway()] = lambda frame: ([], [frame])  # h2 would close
    first = connection.request(GENERATE, framed(asking(100_000)))
    await connection.flush()
    await daemon.engine.until(lambda: daemon.engine.live)
    daemon.engine.hold()
    stopping = asyncio.create_task(daemon.stop())
    assert (await connection.wait_for(goaway())).last_stream_id == 2**31 - 1
    second = connection.request(GENERATE, framed(asking(1)))
    await connection.flush()
    assert (await connection.wait_for(goaway())).last_stream_id == second
    third = connection.request(GENERATE, framed(asking(1)))
    await connection.flush()
    reset = await connection.wait_for(h2.events.StreamReset, third)
    assert reset.error_code == h2.errors.ErrorCodes.REFUSED_STREAM
    daemon.engine.release()
    assert (await connection.status(second))[0] == 0
    connection.h2.reset_stream(first)
    await connection.flush()
    await stopping
    await connection.close()


def goaway():
    from hyperframe.frame import GoAwayFrame

    return GoAwayFrame


async def test_a_client_uses_a_new_connection_after_the_goodbye(start_daemon, make_engine):
    first = await start_daemon(drain_timeout=20.0)
    port = int(first.address.rsplit(":", 1)[1])
    async with Client(first.address) as client:
        stream = client.generate([5], SamplingParams(max_tokens=50))
        await anext(stream)
        first.engine.hold()
        stopping = asyncio.create_task(first.stop())
        await asyncio.sleep(0.3)
        second = await start_daemon(port=port)
        assert [delta.token_ids async for delta in client.generate([7], SamplingParams(max_tokens=1))] == [
            (8,)
        ]
        assert second.engine.finished
        first.engine.release()
        assert [delta async for delta in stream][-1].finish_reason == "length"
        await stopping


async def test_an_idle_daemon_ends_although_clients_are_connected(start_daemon, open_raw):
    daemon = await start_daemon(drain_timeout=20.0)
    connections = [await open_raw(address=daemon.address) for _ in range(5)]
    async with asyncio.timeout(3):
        await daemon.stop()
    for connection in connections:
        await connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_the_daemon(start_daemon, number):
    daemon = await start_daemon()
    os.kill(os.getpid(), number)
    async with asyncio.timeout(5):
        await daemon.task
