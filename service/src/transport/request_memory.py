"""The memory of request messages that are still on their way, of all connections together."""

import asyncio
import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from pykv.service.errors import RequestMemoryError

__all__ = ["RequestMemory", "Room"]

LARGE_SHARE, WAITING_SHARE = 0.75, 0.25
SLOW_SECONDS = 1.0
SLOW_BYTES_PER_SECOND = 4 * 2**20


class Room:
    """What one message has of the memory, until it is left.

    Args:
        num_bytes: of the whole message.
        hurry: is told, once, within how many seconds from the message's start the rest must come, since others wait.
    """

    def __init__(self, num_bytes: int, hurry: Callable[[float], None]) -> None:
        self.num_bytes = num_bytes
        self._hurry: Callable[[float], None] | None = hurry

    def hurry(self) -> None:
        """Others wait."""
        hurry, self._hurry = self._hurry, None
        if hurry is not None:
            hurry(SLOW_SECONDS + self.num_bytes / SLOW_BYTES_PER_SECOND)


@dataclass(slots=True, eq=False)
class _Waiter:
    """Who waits for room."""

    room: Room
    place: int
    ready: "asyncio.Future[None]"

    def rank(self) -> tuple[int, int]:
        """Who is smaller is next, and of the same size who came first."""
        return self.room.num_bytes, self.place


class RequestMemory:
    """Room for messages, each taken as a whole before its bytes are let in.

    So whoever has begun can end, and who finds no room waits, as its client does: no window is handed out. Of those
    that wait the smallest is next, and the largest are refused once what they may have sent already would be too much.
    While any waits, messages that have room must come at a pace of SLOW_BYTES_PER_SECOND, or lose it. Large messages
    leave a quarter to the small ones.

    Args:
        max_bytes: in all.
        small_bytes: up to this size a message is small; so much of a message may have come before it has room.

    Attributes:
        num_bytes: that are taken.
        num_waiting_bytes: that those that wait may have sent already.
    """

    def __init__(self, max_bytes: int, small_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_large_bytes = int(max_bytes * LARGE_SHARE)
        self._max_waiting_bytes = int(max_bytes * WAITING_SHARE)
        self._small_bytes = small_bytes
        self._rooms: set[Room] = set()
        self._waiting: list[_Waiter] = []
        self._places = count()
        self.num_bytes = 0
        self.num_waiting_bytes = 0

    async def take(self, room: Room) -> None:
        """Returns once there is room; a caller that is cancelled meanwhile has none.

        Raises:
            RequestMemoryError: too many wait.
        """
        if self._has_room(room.num_bytes):
            self._give(room)
            return
        waiter = _Waiter(room, next(self._places), asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiter, key=_Waiter.rank)
        self.num_waiting_bytes += self._waiting_bytes(room)
        self._refuse_largest()
        for other in self._rooms:
            other.hurry()
        try:
            await waiter.ready
        except BaseException:
            self._forget(waiter)
            self.leave(room)  # given in the same turn
            raise

    def leave(self, room: Room) -> None:
        """Gives the room to those that wait; does nothing where there is none."""
        if room not in self._rooms:
            return
        self._rooms.discard(room)
        self.num_bytes -= room.num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].room.num_bytes):
            waiter = self._waiting[0]
            self._forget(waiter)
            if waiter.ready.done():  # its call was cancelled, and has not had its turn since
                continue
            self._give(waiter.room)
            waiter.ready.set_result(None)
            if self._waiting:
                waiter.room.hurry()

    def _refuse_largest(self) -> None:
        while self.num_waiting_bytes > self._max_waiting_bytes:
            waiter = self._waiting[-1]
            self._forget(waiter)
            message = f"the requests that come in take more than {self._max_bytes} bytes; try again later"
            if not waiter.ready.done():
                waiter.ready.set_exception(RequestMemoryError(message))

    def _forget(self, waiter: "_Waiter") -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.num_waiting_bytes -= self._waiting_bytes(waiter.room)

    def _waiting_bytes(self, room: Room) -> int:
        return min(room.num_bytes, self._small_bytes)

    def _give(self, room: Room) -> None:
        self._rooms.add(room)
        self.num_bytes += room.num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit; alone, any message does."""
        most = self._max_bytes if num_bytes <= self._small_bytes else self._max_large_bytes
        return self.num_bytes + num_bytes <= most or not self._rooms
