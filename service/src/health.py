"""Health that is true: readiness follows what the engine does, not what the front end can answer."""

import time

import anyio
import structlog
from grpclib._typing import IServable
from grpclib.health.check import ServiceStatus
from grpclib.health.service import OVERALL, Health

from pykv.errors import EngineDeadError
from pykv.service.calls import Calls
from pykv.service.errors import EngineStalledError
from pykv.service.served import TokenEngine

__all__ = ["HealthState", "watch_engine"]

WATCH_SECONDS = 0.25

log = structlog.get_logger("pykv.service")


class HealthState:
    """Liveness, under the empty name, and readiness, under the service's name."""

    def __init__(self) -> None:
        self._liveness = ServiceStatus()
        self._readiness = ServiceStatus()
        self._is_ending = False
        self._liveness.set(True)
        self._readiness.set(False)

    def service(self, engine_service: IServable) -> Health:
        """The health service that reports them."""
        return Health({OVERALL: [self._liveness], engine_service: [self._readiness]})

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
