"""What the calls of one connection take until their requests have come."""

from collections.abc import Callable

from pykv.service.transport.allowance import Allowance
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.request_memory import CALL_BYTES, RequestMemory
from pykv.service.transport.room import Room
from pykv.service.transport.shared_budget import Sharer

__all__ = ["Incoming"]

SLOW_AT_ONCE = 16


class Incoming:
    """The connection's part of the memory that all share, and a count of those that made others wait for nothing.

    Args:
        sharer: the connection.
        is_behind: whether the daemon has not looked yet at all that the connection sent.
    """

    def __init__(
        self,
        limits: TransportLimits,
        memory: RequestMemory,
        sharer: Sharer,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sharer = sharer
        self.is_behind = is_behind
        self._memory = memory
        self._beginnings: dict[int, int] = {}
        self._slow_cost = limits.control_frames_burst / SLOW_AT_ONCE
        self._slow = Allowance(limits)

    def begin(self, stream_id: int, num_bytes: int) -> bool:
        """A call begins, which takes so many bytes, of headers say, and its state; False = there is no room for it."""
        num_bytes += CALL_BYTES
        if not self._memory.beginnings.take(self.sharer, num_bytes):
            return False
        self._beginnings[stream_id] = num_bytes
        return True

    def end(self, stream_id: int) -> None:
        """The call has ended, or somebody else bounds it from now on; does nothing where that is so already."""
        num_bytes = self._beginnings.pop(stream_id, None)
        if num_bytes is not None:
            self._memory.beginnings.give_back(self.sharer, num_bytes)

    async def take(self, room: Room) -> None:
        """Returns once there is room for a message.

        Raises:
            RequestMemoryError: too many wait.
        """
        await self._memory.take(room)

    def excuse(self, room: Room) -> None:
        """The message has come while it waited."""
        self._memory.excuse(room)

    def hear(self, room: Room, num_bytes: int) -> None:
        """So many bytes of a message came that has room."""
        self._memory.hear(room, num_bytes)

    def leave(self, room: Room) -> None:
        """The message is with whoever serves the call, or never will be."""
        self._memory.leave(room)

    def count_slow(self) -> None:
        """Nothing of a message came, and others waited for its room."""
        self._slow.charge(self._slow_cost)

    @property
    def are_too_slow(self) -> bool:
        """Whether there were more of those than may be, SLOW_AT_ONCE at once."""
        return self._slow.is_overdrawn
