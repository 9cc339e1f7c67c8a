"""The end of the daemon: no more calls, time for those that run, then the end of all."""

import signal

import anyio
import structlog
from anyio.abc import TaskStatus

from pykv.service.calls import Calls
from pykv.service.errors import ShuttingDownError
from pykv.service.health import HealthState
from pykv.service.transport import CallServer

__all__ = ["Shutdown", "end_calls"]

GOAWAY_SECONDS = 0.1
END_SECONDS = 2.0

log = structlog.get_logger("pykv.service")


async def end_calls(calls: Calls) -> None:
    """Ends what still runs with UNAVAILABLE; an engine that is closed would end it as if it were aborted."""
    await calls.close(ShuttingDownError("the daemon is shutting down"), END_SECONDS)


class Shutdown:
    """Asked for by a signal; asked for again, it waits no longer."""

    def __init__(self) -> None:
        self._requested = anyio.Event()
        self._patience = anyio.CancelScope()

    async def watch_signals(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Takes SIGTERM and SIGINT as requests, from when it has started; runs until it is cancelled."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for received in signals:
                log.info("signal received", signal=received.name)
                self.request()

    def request(self) -> None:
        """Begins the shutdown, or hurries it on."""
        if self._requested.is_set():
            self._patience.cancel()
        self._requested.set()

    async def wait_requested(self) -> None:
        """Returns when a shutdown was asked for."""
        await self._requested.wait()

    async def drain(
        self, server: CallServer, calls: Calls, health: HealthState, grace_seconds: float
    ) -> None:
        """Lets the calls in flight go on for `grace_seconds`, then ends what is left and all connections.

        Calls that are on their way while the clients learn of it are still served, and so are those of clients whose
        handshake has begun.
        """
        health.set_ending()
        server.stop_listening()
        await server.say_goodbye(min(GOAWAY_SECONDS, grace_seconds))
        log.info("draining", num_calls=len(calls), grace_seconds=grace_seconds)
        self._patience.deadline = anyio.current_time() + grace_seconds
        with self._patience:
            await server.wait_begun()
            await calls.wait_idle()
        await end_calls(calls)
        await server.end()
