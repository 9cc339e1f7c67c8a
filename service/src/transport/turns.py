"""Shares the turns of the event loop among the connections that have sent something."""

import asyncio
import time
from collections import deque
from typing import Protocol

__all__ = ["Feeder", "Turns"]

TURN_SECONDS = 0.005
TURN_CALLS = 16
WAITED_ONE_OF = 4


class Feeder(Protocol):
    """A connection."""

    @property
    def has_more(self) -> bool:
        """Whether something that it received is not handled yet."""

    def feed(self) -> int:
        """Handles one piece of it, and returns how many calls that began."""


class Turns:
    """Bounds how much of one turn of the loop all connections together may take, in seconds and in calls begun.

    What does not fit waits for later turns, one piece of each connection after another. Connections that have not
    waited yet come before those whose first piece was not all, so that a short call among floods is soon served; of
    WAITED_ONE_OF pieces one is of those that wait longer.
    """

    def __init__(self) -> None:
        self._new: deque[Feeder] = deque()
        self._old: deque[Feeder] = deque()
        self._waiting: set[Feeder] = set()
        self._seconds_left = TURN_SECONDS
        self._calls_left = TURN_CALLS
        self._num_pieces = 0
        self._is_next_due = False

    def add(self, feeder: Feeder) -> None:
        """Takes a connection that has received something, and handles it now if this turn is not used up."""
        if feeder in self._waiting:
            return
        self._waiting.add(feeder)
        self._new.append(feeder)
        self._use()

    def _use(self) -> None:
        while self._waiting and self._seconds_left > 0.0 and self._calls_left > 0:
            self._serve(self._next())
        if not self._is_next_due:
            self._is_next_due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A turn begins; the tasks of the calls that began in the last one have had their first steps."""
        self._is_next_due = False
        self._seconds_left, self._calls_left = TURN_SECONDS, TURN_CALLS
        if self._waiting:
            self._use()

    def _next(self) -> Feeder:
        self._num_pieces += 1
        if self._old and (not self._new or self._num_pieces % WAITED_ONE_OF == 0):
            return self._old.popleft()
        return self._new.popleft()

    def _serve(self, feeder: Feeder) -> None:
        start = time.monotonic()
        try:
            self._calls_left -= feeder.feed()
        finally:
            self._seconds_left -= time.monotonic() - start
            if feeder.has_more:
                self._old.append(feeder)
            else:
                self._waiting.discard(feeder)
