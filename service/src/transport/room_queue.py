"""The waiting for room, and the time that messages with room have for going on while others wait."""

import asyncio

from pykv.service.errors import RequestMemoryError
from pykv.service.transport.room import SLOW_SECONDS, Room
from pykv.service.transport.room_pool import RoomPool

__all__ = ["NO_ROOM", "RoomQueue"]

LOOK_SECONDS = 0.1
"""As long as some wait, every so often it is looked whether others have to lose their room."""
LOST_A_TURN = 16
"""At most so many lose theirs in one turn of the event loop."""
HELPED = 8
"""For at most so many of those that wait, whose turn is first, one that may lose its room is looked for."""
NO_ROOM = "no room for the request's message; try again later"


class RoomQueue:
    """Lets messages wait for the room of a pool, each until its turn has come.

    From SLOW_SECONDS after somebody had to wait until nobody does, messages that have room lose it to those that wait:
    first what is in the way (`RoomPool.in_the_way`), then those of which less than `Room.least_bytes` came within
    SLOW_SECONDS (`RoomPool.overdue`). Those of a connection that the daemon is behind with get a second more, a few
    times. As many are lost as are needed, LOST_A_TURN in one turn of the loop. How long a message that goes on slowly
    may take in all is its call's to bound.
    """

    def __init__(self, pool: RoomPool) -> None:
        self._pool = pool
        self._ready: dict[Room, asyncio.Future[bool]] = {}  # of those that wait
        self._next_look: asyncio.Handle | None = None

    @property
    def num_bytes(self) -> int:
        """Of the messages that have room."""
        return self._pool.num_bytes

    @property
    def num_waiting(self) -> int:
        """Messages that wait for room."""
        return self._pool.num_waiting

    async def take(self, room: Room) -> None:
        """Returns once there is room, or it is excused; a caller that is cancelled meanwhile has none.

        Raises:
            RequestMemoryError: too many wait.
        """
        loop = asyncio.get_running_loop()
        ready = self._ready[room] = loop.create_future()
        self._pool.wait(room)
        self._serve()
        if not ready.done():
            self._heed_crowd(room)
        try:
            may_go_on = await ready
        except BaseException:
            self._forget(room)
            self.leave(room)  # given in the same turn
            raise
        if not may_go_on:
            raise RequestMemoryError(NO_ROOM)

    def excuse(self, room: Room) -> None:
        """Lets a message that waits go on without room, since it has come meanwhile."""
        self._forget(room, may_go_on=True)

    def hear(self, room: Room, num_bytes: int) -> None:
        """So many bytes of a message came, at least one; does nothing where it has no room."""
        if room not in self._pool:
            return
        room.num_come += num_bytes
        room.num_new += num_bytes
        if room.num_new >= room.least_bytes:
            room.num_new = 0
            self._pool.renew(room, self._now())

    def leave(self, room: Room) -> None:
        """Gives the room to those that wait; does nothing where there is none."""
        if room in self._pool:
            self._pool.leave(room)
            self._serve()

    def _serve(self) -> list[Room]:
        """Gives room to those whose turn it is, as long as there is some; returns those that others make way for."""
        while self._pool.num_waiting:
            room, stuck = self._pool.turn()
            gone = [each for each in stuck if self._ready[each].done()]  # cancelled, without a turn since
            for each in gone:
                self._drop(each)
            if gone:
                continue
            if room is None:
                return stuck
            if self._ready[room].done():
                self._drop(room)
                continue
            self._pool.give(room, self._now())
            self._ready.pop(room).set_result(True)
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        return []

    def _heed_crowd(self, room: Room) -> None:
        """Does what must be done where one more waits."""
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._look)
        refused = self._pool.one_too_many(room)
        if refused is not None:
            self._forget(refused)

    def _forget(self, room: Room, *, may_go_on: bool = False) -> None:
        """Has a message wait no longer, if it does, and those behind it have their turn."""
        if room in self._ready:
            ready = self._drop(room)
            if not ready.done():
                ready.set_result(may_go_on)
            self._serve()

    def _drop(self, room: Room) -> "asyncio.Future[bool]":
        self._pool.wait_no_longer(room)
        return self._ready.pop(room)

    def _look(self) -> None:
        """Takes rooms from others for those that wait."""
        self._next_look = None
        for _ in range(LOST_A_TURN):
            stuck = self._serve()
            room = next(filter(None, map(self._to_lose, stuck[:HELPED])), None)
            if room is None:
                break
            room.is_lost = True
            room.when_lost()
            self._pool.leave(room)
        if self._serve():
            seconds = 0.0 if room is not None else LOOK_SECONDS
            self._next_look = asyncio.get_running_loop().call_later(seconds, self._look)

    def _to_lose(self, waits: Room) -> Room | None:
        """The room that is lost next for a message that waits; None = none at this time."""
        now = self._now()
        for find in (self._pool.in_the_way, self._pool.overdue):
            for _ in range(LOST_A_TURN):
                room = find(waits, now)
                if room is None:
                    break
                if not room.may_be_put_off:
                    room.was_slow = room.due <= now
                    return room
                self._pool.put_off(room, now)
        return None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
