"""The memory of requests that are still on their way, of all connections together."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from pykv.service.errors import RequestMemoryError
from pykv.service.transport.shared_budget import SharedBudget, Sharer
from pykv.service.transport.waiting_line import WaitingLine

__all__ = ["NO_ROOM", "SLOW_SECONDS", "RequestMemory", "Room"]

LARGE_SHARE, BEGINNINGS_SHARE = 0.75, 0.25
LEAST_BEGINNINGS_BYTES = 4 * 2**20
SLOW_SECONDS = 1.0
SLOW_PART, MOST_SLOW_BYTES = 32, 16 * 1024
LOST_A_TURN = 16
NO_ROOM = "no room for the request's message; try again later"


class Room:
    """What one message has of the memory, until it is left or lost.

    Args:
        sharer: whose message it is.
        num_bytes: of the whole message.
        when_lost: is told, once, that the message did not come in time and others need its room.
        is_behind: whether the daemon has not looked yet at all that its connection sent.

    Attributes:
        is_given: whether there is, or was, room.
        is_lost: whether it went to others.
        num_come: bytes of the message that came since there is room.
        num_new: the same since its time was last renewed.
        due: the loop's time until which more must come while others wait.
    """

    def __init__(
        self,
        sharer: Sharer,
        num_bytes: int,
        when_lost: Callable[[], None],
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sharer = sharer
        self.num_bytes = num_bytes
        self.when_lost = when_lost
        self.is_behind = is_behind
        self.is_given = False
        self.is_lost = False
        self.num_come = self.num_new = 0
        self.due = 0.0

    @property
    def least_bytes(self) -> int:
        """So many must come within SLOW_SECONDS while others wait: a byte now and then holds no room."""
        return min(self.num_bytes // SLOW_PART, MOST_SLOW_BYTES)


class RequestMemory:
    """Room for messages, each taken as a whole before its bytes are let in, and for what calls take before that.

    Who finds no room waits, as its client does: no window is handed out. Those that wait come by turns
    (`WaitingLine`); nobody overtakes them. From SLOW_SECONDS after somebody had to wait until nobody does, messages
    that have room lose it where within SLOW_SECONDS less than `Room.least_bytes` came: as many as are needed, those
    that never went on before the others, of each kind those that are overdue longest first, LOST_A_TURN in one turn of
    the loop, and none of a connection that the daemon is behind with. How long a message that goes on slowly may take
    in all is its call's to bound. Large messages leave a quarter to the small ones, and small ones the rest to large
    ones that wait. Nothing takes longer because there are more rooms or more that wait.

    Args:
        max_bytes: in all.
        small_bytes: up to this size a message is small; so much of a message may have come before it has room.

    Attributes:
        beginnings: bytes that calls take whose messages have no room: their headers, their state, and what those that
            wait may have sent already.
    """

    def __init__(self, max_bytes: int, small_bytes: int) -> None:
        self.beginnings = SharedBudget(max(int(max_bytes * BEGINNINGS_SHARE), LEAST_BEGINNINGS_BYTES))
        self._max_bytes = max_bytes
        self._max_large_bytes = int(max_bytes * LARGE_SHARE)
        self._small_bytes = small_bytes
        self._num_small_bytes = self._num_large_bytes = 0
        self._silent: OrderedDict[Room, None] = OrderedDict()  # were not renewed yet; by their due
        self._heard: OrderedDict[Room, None] = OrderedDict()  # all other rooms; by their due
        self._small: WaitingLine[Room] = WaitingLine()
        self._large: WaitingLine[Room] = WaitingLine()
        self._ready: dict[Room, asyncio.Future[None]] = {}
        self._next_look: asyncio.Handle | None = None

    @property
    def num_bytes(self) -> int:
        """Of the messages that have room."""
        return self._num_small_bytes + self._num_large_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that wait for room."""
        return len(self._small) + len(self._large)

    async def take(self, room: Room) -> None:
        """Returns once there is room, or it is excused; a caller that is cancelled meanwhile has none.

        Raises:
            RequestMemoryError: too much waits of this connection, of its peer or of all.
        """
        line = self._small if self._is_small(room) else self._large
        if not line and self._fits(room):
            self._give(room)
            return
        if not self.beginnings.take(room.sharer, self._small_bytes):
            raise RequestMemoryError(NO_ROOM)
        ready = self._ready[room] = asyncio.get_running_loop().create_future()
        line.add(room)
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._look)
        try:
            await ready
        except BaseException:
            self.leave(room)  # given in the same turn
            raise
        finally:
            line.discard(room)
            del self._ready[room]
            self.beginnings.give_back(room.sharer, self._small_bytes)
            self._serve()

    def excuse(self, room: Room) -> None:
        """Lets a message that waits go on without room, since it has come meanwhile."""
        ready = self._ready.get(room)
        if ready is not None and not ready.done():
            ready.set_result(None)

    def hear(self, room: Room, num_bytes: int) -> None:
        """So many bytes of a message came, at least one; does nothing where it has no room."""
        rooms = self._rooms_with(room)
        if room not in rooms:
            return
        room.num_come += num_bytes
        room.num_new += num_bytes
        if room.num_new >= room.least_bytes:
            room.num_new = 0
            room.due = asyncio.get_running_loop().time() + SLOW_SECONDS
            del rooms[room]
            self._heard[room] = None

    def leave(self, room: Room) -> None:
        """Gives the room to those that wait; does nothing where there is none."""
        rooms = self._rooms_with(room)
        if room not in rooms:
            return
        del rooms[room]
        self._count(room, -room.num_bytes)
        self._serve()

    def _serve(self) -> None:
        for line in (self._large, self._small):
            while line and self._fits(line.first()):
                room = line.take_first()
                ready = self._ready[room]
                if not ready.done():  # else its call was cancelled or excused, and has not had its turn since
                    self._give(room)
                    ready.set_result(None)
        if not self.num_waiting and self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _give(self, room: Room) -> None:
        room.is_given = True
        room.due = asyncio.get_running_loop().time() + SLOW_SECONDS
        self._silent[room] = None
        self._count(room, room.num_bytes)

    def _look(self) -> None:
        """Takes room from messages that are overdue, as long as somebody waits."""
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_soon(self._look)
        for _ in range(LOST_A_TURN):
            first = [next(iter(rooms)) for rooms in (self._silent, self._heard) if rooms]
            now = loop.time()
            room = next((room for room in first if room.due <= now), None)
            if room is None:
                self._next_look.cancel()
                due = min((room.due for room in first), default=now + SLOW_SECONDS)
                self._next_look = loop.call_at(due, self._look)
                return
            if room.is_behind():  # what was sent of it may be there
                room.due = now + SLOW_SECONDS
                self._rooms_with(room).move_to_end(room)
                continue
            room.is_lost = True
            room.when_lost()
            self.leave(room)
            if self._next_look is None:  # nobody waits any more
                return

    def _rooms_with(self, room: Room) -> OrderedDict[Room, None]:
        return self._silent if room in self._silent else self._heard

    def _count(self, room: Room, num_bytes: int) -> None:
        if self._is_small(room):
            self._num_small_bytes += num_bytes
        else:
            self._num_large_bytes += num_bytes

    def _is_small(self, room: Room) -> bool:
        return room.num_bytes <= self._small_bytes

    def _fits(self, room: Room) -> bool:
        """Whether there is room; alone among the small or the large, any message has."""
        after = self.num_bytes + room.num_bytes
        max_small_bytes = self._max_bytes - self._max_large_bytes
        if self._is_small(room):
            is_within = self._num_small_bytes + room.num_bytes <= max_small_bytes or not self._num_small_bytes
            return is_within or (not self._large and after <= self._max_bytes)
        if self._num_large_bytes and self._num_large_bytes + room.num_bytes > self._max_large_bytes:
            return False
        return after <= self._max_bytes or self._num_small_bytes <= max_small_bytes
