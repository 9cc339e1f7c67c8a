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
from pykv.service.options import ServeOptions
from pykv.service.served import ServedModel

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
LONG = SamplingParams(max_tokens=100_000)


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
        engine.progress()
        await wait_for_status(daemon, SERVING)
        engine.release()
        assert (await anext(client.generate([5], LONG))).token_ids == (6,)


@pytest.mark.asyncio
async def test_idleness_and_slow_steps_are_no_stall(start_daemon):
    daemon = await start_daemon(progress_timeout=0.4)
    async with Client(daemon.address) as client:
        await asyncio.sleep(0.8)
        assert await client.health() == "SERVING"
        daemon.engine.hold()
        waiting = asyncio.create_task(anext(client.generate([5], LONG)))
        for _ in range(8):
            await asyncio.sleep(0.1)
            daemon.engine.progress()
        assert await client.health() == "SERVING"
        daemon.engine.release()
        assert (await waiting).token_ids == (6,)


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
    with pytest.raises(ServiceError, match="counts") as failure:
        await client.get_stats()
    assert failure.value.status == "UNAVAILABLE"
    assert await client.health() == "SERVING"
    may_end.set()
