"""Health is true: it follows the engine."""

import asyncio
import threading
import time

import pytest
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pykv.client import Client, ServiceError
from pykv.errors import EngineDeadError
from pykv.sampling import SamplingParams
from pykv.service.client.channel import PatientChannel
from pykv.service.daemon import Daemon
from pykv.service.health import ProgressWatch
from pykv.service.options import ServeOptions
from pykv.service.served import ServedModel

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
LONG = SamplingParams(max_tokens=100_000)


def test_an_idle_engine_is_not_stalled_however_long():
    watch = ProgressWatch(10.0)
    assert not any(watch.is_stalled(now, last_progress=0.0, has_work=False) for now in range(0, 1000, 5))
    assert not watch.is_stalled(1004.0, last_progress=0.0, has_work=True)


def test_an_engine_with_work_and_no_progress_is_stalled_after_the_limit():
    watch = ProgressWatch(10.0)
    watch.is_stalled(100.0, last_progress=99.0, has_work=False)
    assert not watch.is_stalled(110.0, last_progress=99.0, has_work=True)
    assert watch.is_stalled(110.1, last_progress=99.0, has_work=True)


def test_slow_steps_that_end_are_progress():
    watch = ProgressWatch(10.0)
    for now in range(0, 100, 9):
        assert not watch.is_stalled(now, last_progress=now - 1.0, has_work=True)


def test_a_stalled_engine_stays_so_without_its_calls_until_it_moves():
    watch = ProgressWatch(10.0)
    watch.is_stalled(0.0, last_progress=0.0, has_work=True)
    assert watch.is_stalled(11.0, last_progress=0.0, has_work=True)
    assert watch.is_stalled(12.0, last_progress=0.0, has_work=False)
    assert not watch.is_stalled(13.0, last_progress=12.5, has_work=False)


@pytest.mark.asyncio
async def test_a_daemon_is_alive_and_ready(client):
    assert await client.health() == "SERVING"
    assert await client.health("") == "SERVING"


@pytest.mark.asyncio
async def test_an_unknown_service_has_no_health(client):
    with pytest.raises(ServiceError) as failure:
        await client.health("nothing")
    assert failure.value.status == "NOT_FOUND"


@pytest.mark.asyncio
async def test_while_the_model_loads_the_daemon_is_alive_but_not_ready(make_engine, description):
    may_load = threading.Event()

    def load(options, progress):
        may_load.wait(20)
        return ServedModel(make_engine(), description)

    daemon = Daemon(ServeOptions(port=0), load)
    running = asyncio.create_task(daemon.run())
    await asyncio.sleep(0)
    async with Client(daemon.address) as client:
        assert (await client.health(""), await client.health()) == ("SERVING", "NOT_SERVING")
        with pytest.raises(ServiceError, match="not loaded") as failure:
            await anext(client.generate([5]))
        assert failure.value.status == "UNAVAILABLE"
        may_load.set()
        await daemon.wait_ready()
        assert await client.health() == "SERVING"
        daemon.request_shutdown()
    await running


@pytest.mark.asyncio
async def test_an_engine_that_died_ends_its_calls_and_the_daemon_is_neither_ready_nor_alive(client, engine):
    engine.hold()
    waiting = [asyncio.create_task(anext(client.generate([5], LONG))) for _ in range(5)]
    await engine.until(lambda: len(engine.live) == 5)
    start = time.monotonic()
    engine.error = EngineDeadError("the step failed")  # no stream hears of it
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - start < 1.0
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert (await client.health(""), await client.health()) == ("NOT_SERVING", "NOT_SERVING")
    with pytest.raises(EngineDeadError):
        await anext(client.generate([5], LONG))


@pytest.mark.asyncio
async def test_an_engine_that_hangs_ends_its_calls_and_is_ready_again_once_it_moves(start_daemon):
    daemon = await start_daemon(progress_timeout=0.3)
    engine = daemon.engine
    async with Client(daemon.address) as client:
        engine.hold()
        with pytest.raises(ServiceError, match="no progress") as failure:
            await anext(client.generate([5], LONG))
        assert failure.value.status == "UNAVAILABLE"
        assert (await client.health(""), await client.health()) == ("SERVING", "NOT_SERVING")
        engine.last_progress = time.monotonic()
        await wait_for_status(daemon, SERVING)
        engine.release()
        assert (await anext(client.generate([5], LONG))).token_ids == (6,)


@pytest.mark.asyncio
async def test_a_client_that_stalls_after_its_tokens_were_made_is_no_stalled_engine(
    start_daemon, open_raw, framed
):
    from pykv.service.protocol import engine_pb2 as pb

    daemon = await start_daemon(progress_timeout=0.3, stall_timeout=20.0)
    connection = await open_raw(initial_window=0, address=daemon.address)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=5))
    connection.request("/pykv.v1.Engine/Generate", framed(request))
    await connection.flush()
    await daemon.engine.until(lambda: daemon.engine.finished)
    await asyncio.sleep(0.8)  # longer than the limit: nothing may happen
    async with Client(daemon.address) as client:
        assert await client.health() == "SERVING"
    assert len(daemon.daemon._calls) == 1
    connection.abort()


async def wait_for_status(daemon, status):
    """Watches the health until it has this status."""
    async with watched(daemon) as statuses, asyncio.timeout(20):
        async for seen in statuses:
            if seen == status:
                return


class watched:  # noqa: N801
    """The statuses that a watcher of the service's health is told."""

    def __init__(self, daemon):
        host, port = daemon.address.split(":")
        self.channel = PatientChannel(host, int(port))

    async def __aenter__(self):
        return self._statuses()

    async def __aexit__(self, *_):
        self.channel.close()

    async def _statuses(self):
        async with HealthStub(self.channel).Watch.open() as stream:
            await stream.send_message(HealthCheckRequest(service="pykv.v1.Engine"), end=True)
            async for reply in stream:
                yield reply.status


@pytest.mark.asyncio
async def test_watchers_are_told_of_the_end(start_daemon):
    daemon = await start_daemon(drain_timeout=20.0)
    async with watched(daemon) as statuses:
        assert await anext(statuses) == SERVING
        stopping = asyncio.create_task(daemon.stop())
        assert await anext(statuses) == NOT_SERVING
        await stopping


@pytest.mark.asyncio
async def test_counts_of_a_hanging_engine_do_not_hang_the_daemon(client, engine, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr("pykv.service.engine_service.STATS_SECONDS", 0.1)
    monkeypatch.setattr(engine, "stats", lambda: may_end.wait(20))
    with pytest.raises(TimeoutError):
        await client.get_stats()
    assert await client.health() == "SERVING"
    may_end.set()
