"""The memory of requests that are still on their way, of all connections together."""

from pykv.service.transport.room import Room
from pykv.service.transport.room_pool import RoomPool
from pykv.service.transport.room_queue import RoomQueue
from pykv.service.transport.shared_budget import SharedBudget

__all__ = ["CALL_BYTES", "OWN_BYTES", "RequestMemory"]

SMALL_SHARE = BEGINNINGS_SHARE = 0.25
WAITING_SHARE = 1 / 3
LEAST_BEGINNINGS_BYTES = 4 * 2**20
LEAST_WAITING = 64
CALL_BYTES = 8 * 1024
"""About what a call takes beside its headers and its message: a task, a stream, and HTTP/2's state."""
OWN_BYTES = 2 * CALL_BYTES
"""Of what calls take before their messages have room; each connection has it in any case."""


class RequestMemory:
    """Room for messages, each taken as a whole before its bytes are let in, and for what calls take before that.

    Who finds no room waits, as its client does: no window is handed out. Small messages have room of their own, and so
    have large ones.

    Args:
        max_bytes: of the messages that have room.
        small_bytes: up to this size a message is small; so much of a message may have come before it has room.

    Attributes:
        beginnings: bytes that calls take whose messages have no room: their headers and their state. Some are each
            connection's own, so that one call at least finds room, a probe's say.
    """

    def __init__(self, max_bytes: int, small_bytes: int) -> None:
        beginnings = max(int(max_bytes * BEGINNINGS_SHARE), LEAST_BEGINNINGS_BYTES)
        self.beginnings = SharedBudget(beginnings, of_its_own=OWN_BYTES)
        self._small_bytes = small_bytes
        for_small = int(max_bytes * SMALL_SHARE)
        self._small = self._queue(for_small)
        self._large = self._queue(max_bytes - for_small)

    @property
    def num_bytes(self) -> int:
        """Of the messages that have room."""
        return self._small.num_bytes + self._large.num_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that wait for room."""
        return self._small.num_waiting + self._large.num_waiting

    async def take(self, room: Room) -> None:
        """Returns once there is room, or it is excused; a caller that is cancelled meanwhile has none.

        Raises:
            RequestMemoryError: too many wait.
        """
        await self._queue_of(room).take(room)

    def excuse(self, room: Room) -> None:
        """Lets a message that waits go on without room, since it has come meanwhile."""
        self._queue_of(room).excuse(room)

    def hear(self, room: Room, num_bytes: int) -> None:
        """So many bytes of a message came, at least one; does nothing where it has no room."""
        self._queue_of(room).hear(room, num_bytes)

    def leave(self, room: Room) -> None:
        """Gives the room to those that wait; does nothing where there is none."""
        self._queue_of(room).leave(room)

    def _queue(self, max_bytes: int) -> RoomQueue:
        max_waiting = int(max_bytes * WAITING_SHARE / self._small_bytes)
        return RoomQueue(RoomPool(max_bytes, max(max_waiting, LEAST_WAITING)))

    def _queue_of(self, room: Room) -> RoomQueue:
        return self._small if room.num_bytes <= self._small_bytes else self._large
