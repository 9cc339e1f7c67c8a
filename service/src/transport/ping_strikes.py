"""How often a client may ask with a PING whether the server is still there."""

import time
from collections.abc import Callable

from pykv.service.transport.limits import TransportLimits

__all__ = ["PingStrikes"]

IDLE_INTERVAL_SECONDS = 7200.0


class PingStrikes:
    """Counts the PINGs that come too soon after the one before, as gRPC's servers do.

    What the server sends forgives them: clients measure with PINGs how fast data comes.
    """

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._last = -float("inf")
        self._num_strikes = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the client has pinged more often than it may."""
        most = self._limits.max_ping_strikes
        return most > 0 and self._num_strikes > most

    def forgive(self) -> None:
        """Headers or data were sent."""
        self._last = -float("inf")
        self._num_strikes = 0

    def count(self, *, has_calls: bool) -> None:
        """A PING came, on a connection with or without calls."""
        now = self._clock()
        self._num_strikes += now < self._last + self._interval_seconds(has_calls)
        self._last = now

    def _interval_seconds(self, has_calls: bool) -> float:
        if has_calls or self._limits.keepalive_permit_without_calls:
            return self._limits.min_ping_interval_seconds
        return IDLE_INTERVAL_SECONDS
