"""Who only ever makes calls that nobody serves."""

import time
from collections.abc import Callable

from grpclib.const import Status

from pykv.service.transport.allowance import Allowance
from pykv.service.transport.limits import TransportLimits

__all__ = ["Refusals"]

REFUSED = {str(status.value) for status in (Status.UNIMPLEMENTED, Status.UNAUTHENTICATED)}
SERVED = str(Status.OK.value)


class Refusals:
    """Counts one connection's calls that were refused for their headers, path or credential, or whose message is none.

    They have an allowance of the size of that for control frames, which fills with time and with calls that end well:
    a gateway may pass some of them on.
    """

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowance = Allowance(limits, clock)

    @property
    def are_too_many(self) -> bool:
        """Whether more calls were refused than may be."""
        return self._allowance.is_overdrawn

    def count(self, cost: float = 1.0) -> None:
        """A call was refused, as much work as so many that have only headers."""
        self._allowance.charge(cost)

    def heed(self, status: str) -> None:
        """A call ended with this grpc-status."""
        if status in REFUSED:
            self.count()
        elif status == SERVED:
            self._allowance.give_back(1.0)
