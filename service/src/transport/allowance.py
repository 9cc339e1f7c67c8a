"""What a connection may make the daemon do for nothing, which fills again with time."""

import time
from collections.abc import Callable

from pykv.service.transport.limits import TransportLimits

__all__ = ["Allowance"]


class Allowance:
    """Full at first, of the size and the rate of that for control frames."""

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = float(limits.control_frames_burst)
        self._per_second = limits.control_frames_per_second
        self._clock = clock
        self._level = self._burst
        self._filled_at = clock()

    @property
    def is_overdrawn(self) -> bool:
        """Whether more was charged than there was."""
        return self._level < 0.0

    def charge(self, cost: float) -> None:
        """Takes so much out, after what came in since the last time."""
        now = self._clock()
        gained = (now - self._filled_at) * self._per_second
        self._level = min(self._level + gained, self._burst) - cost
        self._filled_at = now

    def give_back(self, cost: float) -> None:
        """Puts so much in; it never holds more than at first."""
        self._level = min(self._level + cost, self._burst)
