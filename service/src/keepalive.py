"""Finds peers that have vanished without a word, by asking those that have gone quiet."""

import asyncio
from collections.abc import Callable

__all__ = ["Keepalive"]

LATE_SECONDS = 0.1


class Keepalive:
    """Watches one connection until it is stopped. Whatever the peer sends is a sign of life.

    Args:
        seconds: after so long without one the peer is asked.
        timeout_seconds: how long it may take to answer.
        permits_without_calls: whether it is asked while the connection has no calls.
        ping: asks the peer for one.
        has_calls: whether the connection has calls.
        give_up: told, once, that none came in time.
    """

    def __init__(
        self,
        seconds: float,
        timeout_seconds: float,
        permits_without_calls: bool,
        *,
        ping: Callable[[], None],
        has_calls: Callable[[], bool],
        give_up: Callable[[], None],
    ) -> None:
        self._seconds = seconds
        self._timeout_seconds = timeout_seconds
        self._permits_without_calls = permits_without_calls
        self._ping = ping
        self._has_calls = has_calls
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._last_heard = self._loop.time()
        self._was_heard = True
        self._timer = self._loop.call_later(seconds, self._ask)

    def hear(self) -> None:
        """The peer sent something."""
        self._last_heard = self._loop.time()
        self._was_heard = True

    def stop(self) -> None:
        """Ends the watch."""
        self._timer.cancel()

    def _wait(self) -> None:
        due = self._last_heard + self._seconds
        self._timer = self._loop.call_at(due, self._ask)

    def _ask(self) -> None:
        now = self._loop.time()
        if self._last_heard + self._seconds > now:
            self._wait()
        elif self._permits_without_calls or self._has_calls():
            self._was_heard = False
            self._timer = self._loop.call_later(self._timeout_seconds, self._judge)
            self._ping()
        else:
            self._timer = self._loop.call_later(self._seconds, self._ask)

    def _judge(self) -> None:
        """Waits a moment more: where the loop was held up, the answer may be in the socket."""
        if self._was_heard:
            self._wait()
        else:
            self._timer = self._loop.call_later(LATE_SECONDS, self._end)

    def _end(self) -> None:
        if self._was_heard:
            self._wait()
        else:
            self._give_up()
