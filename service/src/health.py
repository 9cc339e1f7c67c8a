"""Health that is true: readiness follows what the engine does, not what the front end can answer."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import anyio
import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.check import ServiceStatus
from grpclib.health.v1.health_grpc import HealthBase
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.server import Stream

from pykv.errors import EngineDeadError
from pykv.service.calls import Calls
from pykv.service.errors import EngineStalledError
from pykv.service.requests import receive
from pykv.service.served import TokenEngine
from pykv.service.transport.shared_budget import SharedBudget, Sharer
from pykv.service.transport.sharing import sharer_of

__all__ = ["HealthService", "HealthState", "watch_engine"]

WATCH_SECONDS = 0.25
MAX_WATCHERS = 4096
MAX_WATCHERS_A_CONNECTION = 16

HealthStream = Stream[HealthCheckRequest, HealthCheckResponse]

log = structlog.get_logger("pykv.service")


class HealthService(HealthBase):
    """`grpc.health.v1.Health` for callers without a credential: nothing of what they send is kept.

    Args:
        statuses: by the name of the service.
    """

    def __init__(self, statuses: Mapping[str, ServiceStatus]) -> None:
        self._statuses = statuses
        self._watchers = SharedBudget(MAX_WATCHERS, MAX_WATCHERS_A_CONNECTION, of_its_own=1)

    async def Check(self, stream: HealthStream) -> None:  # noqa: N802
        """Says how a service is now.

        Raises:
            GRPCError: NOT_FOUND; there is none of this name.
        """
        status = await self._asked(stream)
        if status is None:
            raise GRPCError(Status.NOT_FOUND, "no service has this name")
        await stream.send_message(_response_of(status))

    async def Watch(self, stream: HealthStream) -> None:  # noqa: N802
        """Says how a service is, now and whenever it changes; of an unknown one, that it is that.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED; as many as may be watch on the connection, of its peer or in all.
        """
        with self._one_more(sharer_of(stream)):
            status = await self._asked(stream)
            if status is None:
                await stream.send_message(HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN))
                await anyio.sleep_forever()
            else:
                await _tell_changes(status, stream)

    async def _asked(self, stream: HealthStream) -> ServiceStatus | None:
        return self._statuses.get((await receive(stream)).service)

    @contextmanager
    def _one_more(self, sharer: Sharer) -> Iterator[None]:
        if not self._watchers.take(sharer, 1):
            allowed = f"{MAX_WATCHERS_A_CONNECTION} on a connection, {MAX_WATCHERS} in all, and of those a fair part"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"too many watchers of health: allowed is {allowed}")
        try:
            yield
        finally:
            self._watchers.give_back(sharer, 1)


async def _tell_changes(status: ServiceStatus, stream: HealthStream) -> None:
    changed: asyncio.Event = await status.__subscribe__()
    try:
        while True:
            changed.clear()
            await stream.send_message(_response_of(status))
            await changed.wait()
    finally:
        await status.__unsubscribe__(changed)


def _response_of(status: ServiceStatus) -> HealthCheckResponse:
    word = HealthCheckResponse.SERVING if status.__status__() else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=word)


class HealthState:
    """Liveness, under the empty name, and readiness, under the service's name."""

    def __init__(self) -> None:
        self._liveness = ServiceStatus()
        self._readiness = ServiceStatus()
        self._is_ending = False
        self._liveness.set(True)
        self._readiness.set(False)

    def service(self, name: str) -> HealthService:
        """The health service that reports them.

        Args:
            name: of the service whose readiness it is.
        """
        return HealthService({"": self._liveness, name: self._readiness})

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return bool(self._readiness.__status__())

    def set_ready(self) -> None:
        """Requests are served, unless the daemon is about to end."""
        self._readiness.set(not self._is_ending)

    def set_unready(self) -> None:
        """Requests are not served now."""
        self._readiness.set(False)

    def set_ending(self) -> None:
        """Requests will not be served again by this process."""
        self._is_ending = True
        self._readiness.set(False)

    def set_dead(self) -> None:
        """The same, and nothing will end this process but a restart from outside."""
        self.set_ending()
        self._liveness.set(False)


async def watch_engine(engine: TokenEngine, health: HealthState, calls: Calls, limit_seconds: float) -> None:
    """Keeps readiness true, and ends the calls of an engine that died or hangs; returns when it died.

    An idle engine and one with long steps that end are not taken for one that hangs.

    Args:
        limit_seconds: how long an engine with work may go without progress.
    """
    while engine.is_alive:
        if time.monotonic() - engine.last_progress > limit_seconds:
            _end_stalled(health, calls, limit_seconds)
        elif not health.is_ready:
            health.set_ready()
        await anyio.sleep(WATCH_SECONDS)
    log.error("engine dead")
    health.set_dead()
    calls.end_all(EngineDeadError("the engine has ended because of an error"))


def _end_stalled(health: HealthState, calls: Calls, limit_seconds: float) -> None:
    if health.is_ready:
        log.error("engine stalled", limit_seconds=limit_seconds)
    health.set_unready()
    calls.end_all(EngineStalledError(f"the engine made no progress for {limit_seconds:g} s"))
