"""Who has room for messages, who waits for some, whose turn it is, and who gives way: all but the time."""

import math
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice

from pykv.service.transport.room import SLOW_SECONDS, Room
from pykv.service.transport.room_group import Group, Member, Ranks

__all__ = ["RoomPool"]

LOOKED_AT, LOOKED_AT_OF_ONE = 64, 4
"""At most so many messages are looked at in one search, and so many connections of one group."""
OWN_SECONDS = 4.0
"""So much later than to others a message that comes slowly loses its room to one of its own connection."""


class RoomPool:
    """Room for messages of one kind, shared among groups of connections, and in each among the connections.

    A connection may have as much as is left to its group, and a group as much as is left to all: one connection alone
    has about a third, one group half, and who comes next finds some. Those that wait have turns (`FairLine`). What one
    has beyond the others, by an order of magnitude, makes way for them. Nothing takes longer because there are more
    rooms or more that wait.

    Args:
        max_bytes: of all rooms; alone, any message has room.
        max_waiting: messages that wait.

    Attributes:
        num_bytes: of all rooms.
        num_waiting: messages that wait.
    """

    def __init__(self, max_bytes: int, max_waiting: int) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self.num_bytes = self.num_waiting = 0
        self._groups: dict[str, Group] = {}
        self._ranks: Ranks[Group] = Ranks()
        self._silent: OrderedDict[Room, None] = OrderedDict()  # were not renewed yet; by their due
        self._heard: OrderedDict[Room, None] = OrderedDict()  # all other rooms; by their due

    def __contains__(self, room: Room) -> bool:
        return room in self._silent or room in self._heard

    def wait(self, room: Room) -> None:
        """Lets a message wait."""
        group = self._groups.setdefault(room.group, Group())
        group.connections.setdefault(room.sharer, Member()).waiting[room] = None
        self._count(room, num_bytes=0, num_waiting=1)

    def wait_no_longer(self, room: Room) -> None:
        """Forgets a message that waits."""
        del self._connection_of(room).waiting[room]
        self._count(room, num_bytes=0, num_waiting=-1)

    def give(self, room: Room, now: float) -> None:
        """Gives a message that waits its room."""
        room.is_given, room.since, room.due = True, now, now + SLOW_SECONDS
        group, connection = self._groups[room.group], self._connection_of(room)
        self._ranks.line.serve(group, room.num_bytes)
        group.ranks.line.serve(connection, room.num_bytes)
        del connection.waiting[room]
        connection.rooms[room] = self._silent[room] = None
        self._count(room, num_bytes=room.num_bytes, num_waiting=-1)

    def leave(self, room: Room) -> None:
        """Takes the room from a message that has it."""
        del self._rooms_with(room)[room]
        del self._connection_of(room).rooms[room]
        self._count(room, num_bytes=-room.num_bytes, num_waiting=0)

    def renew(self, room: Room, now: float) -> None:
        """Gives a message that has room, and of which enough came, its time again."""
        room.due = now + SLOW_SECONDS
        del self._rooms_with(room)[room]
        self._heard[room] = None
        self._connection_of(room).rooms.move_to_end(room)

    def put_off(self, room: Room, now: float) -> None:
        """The same, although nothing came, but not for ever."""
        room.due = now + SLOW_SECONDS
        room.num_put_off += 1
        self._rooms_with(room).move_to_end(room)

    def turn(self) -> tuple[Room | None, list[Room]]:
        """Whose turn it is, and those for whom others make way.

        Whoever waits for more than it may have now lets others pass; where its group has less than it waits for, only
        such as fair queueing has before it, so that small messages do not keep a large one out.

        Returns:
            The first that waits for whose message there is room; None = there is none. And some who wait before that,
            whose turn it is first.
        """
        stuck: list[Room] = []
        line, ends = self._ranks.line, math.inf
        with closing(self._in_order()) as waiting:
            for group, room in islice(waiting, LOOKED_AT):
                if self._fits(room) and line.ends(group) <= ends:
                    return room, stuck
                stuck.append(room)
                if group.num_bytes < room.num_bytes:
                    ends = min(ends, line.ends(group))
        return None, stuck

    def _in_order(self) -> Generator[tuple[Group, Room]]:
        """The next message of each connection, of LOOKED_AT_OF_ONE of each group, by whose turn it is."""
        with closing(self._ranks.line.in_order()) as groups:
            for group in groups:
                with closing(group.ranks.line.in_order()) as connections:
                    for connection in islice(connections, LOOKED_AT_OF_ONE):
                        yield group, connection.first()

    def _fits(self, room: Room) -> bool:
        """Whether as much as a message that waits needs is left of what its connection may have."""
        group = self._groups[room.group]
        left = self._max_bytes - self.num_bytes - group.num_bytes
        return not self.num_bytes or group.connections[room.sharer].num_bytes + room.num_bytes <= left

    def in_the_way(self, room: Room, now: float) -> Room | None:
        """Which has to make way for a message that waits; None = none.

        Of whoever has more by an order of magnitude than the message's would have then, it is the one of which nothing
        came for the longest time, unless that is swift. No more than LOOKED_AT are looked at.
        """
        candidates = (next(iter(connection.rooms)) for connection in self._richer(room))
        return next((other for other in islice(candidates, LOOKED_AT) if not other.is_swift(now)), None)

    def _richer(self, room: Room) -> Iterator[Member]:
        """Those with whom a message that waits may trade places, whoever has most first."""
        group = self._groups[room.group]
        for other in self._ranks.holding.above(group.num_bytes + room.num_bytes):
            yield from other.ranks.holding.above(0)
        yield from group.ranks.holding.above(group.connections[room.sharer].num_bytes + room.num_bytes)

    def one_too_many(self, room: Room) -> Room | None:
        """Which must not wait any longer, since this one, the last to come, does; None = all may.

        It is the last one of whoever has more that wait, by an order of magnitude, or else the one that came.
        """
        if self.num_waiting <= self._max_waiting:
            return None
        group = self._groups[room.group]
        other = next(self._ranks.crowding.above(group.num_waiting), None)
        if other is not None:
            return next(other.ranks.crowding.above(0)).last()
        connection = next(group.ranks.crowding.above(len(group.connections[room.sharer].waiting)), None)
        return room if connection is None else connection.last()

    def overdue(self, room: Room, now: float) -> Room | None:
        """Which may be taken for a message that waits since its own goes on too slowly; None = none.

        Only whoever has as much, to the order of magnitude, as the message's has already can lose one; its own
        connection, whose messages may all come slowly by one line, OWN_SECONDS later. It is the one that is due first
        of those of which enough never came, or else of the others. No more than LOOKED_AT of each are looked at.
        """
        for rooms in (self._silent, self._heard):
            for other in islice(rooms, LOOKED_AT):
                if other.due > now:
                    break
                if self._may_lose(other, room, now):
                    return other
        return None

    def _may_lose(self, other: Room, room: Room, now: float) -> bool:
        if other.sharer is room.sharer:
            return other.due + OWN_SECONDS <= now
        holders: tuple[Member, Member] | tuple[Group, Group]
        if other.group == room.group:
            holders = self._connection_of(other), self._connection_of(room)
        else:
            holders = self._groups[other.group], self._groups[room.group]
        has, room_has = (holder.num_bytes.bit_length() for holder in holders)
        return has >= room_has

    def _count(self, room: Room, *, num_bytes: int, num_waiting: int) -> None:
        group = self._groups[room.group]
        connection = group.connections[room.sharer]
        connection.num_bytes += num_bytes
        for each in (group, self):
            each.num_bytes += num_bytes
            each.num_waiting += num_waiting
        num_waiting = len(connection.waiting)
        wanted = connection.first().num_bytes if num_waiting else 0
        group.ranks.put(connection, connection.num_bytes, num_waiting, wanted)
        if not (connection.rooms or connection.waiting):
            del group.connections[room.sharer]
            group.ranks.line.forget(connection)
        wanted = group.first().num_bytes if group.num_waiting else 0
        self._ranks.put(group, group.num_bytes, group.num_waiting, wanted)
        if not group.connections:
            del self._groups[room.group]
            self._ranks.line.forget(group)

    def _connection_of(self, room: Room) -> Member:
        return self._groups[room.group].connections[room.sharer]

    def _rooms_with(self, room: Room) -> OrderedDict[Room, None]:
        return self._silent if room in self._silent else self._heard
