"""Who only ever makes calls that nobody serves."""

import time
from collections.abc import Callable

from grpclib.const import Status

from pykv.service.transport.limits import TransportLimits

__all__ = ["Refusals"]

REFUSED = {str(status.value) for status in (Status.UNIMPLEMENTED, Status.UNAUTHENTICATED)}
SERVED = str(Status.OK.value)


class Refusals:
    """Counts one connection's calls that were refused for their headers, path or credential.

    They have an allowance of the size of that for control frames, which fills with time and with calls that end well:
    a gateway may pass some of them on.
    """

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = float(limits.control_frames_burst)
        self._per_second = limits.control_frames_per_second
        self._clock = clock
        self._level = self._burst
        self._filled_at = clock()

    @property
    def are_too_many(self) -> bool:
        """Whether more calls were refused than may be."""
        return self._level < 0.0

    def count(self) -> None:
        """A call was refused."""
        now = self._clock()
        gained = (now - self._filled_at) * self._per_second
        self._level = min(self._level + gained, self._burst) - 1.0
        self._filled_at = now

    def heed(self, status: str) -> None:
        """A call ended with this grpc-status."""
        if status in REFUSED:
            self.count()
        elif status == SERVED:
            self._level = min(self._level + 1.0, self._burst)
