"""What connections, and the groups in which they share, have of a pool of room, and in which orders they are asked."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pykv.fair_line import FairLine
from pykv.service.transport.levels import Levels
from pykv.service.transport.room import Room
from pykv.service.transport.shared_budget import Sharer

__all__ = ["Group", "Member", "Ranks"]

T = TypeVar("T", bound=Hashable)


class Ranks(Generic[T]):
    """Groups, or the connections of one, in the orders in which they are asked for.

    Attributes:
        holding: those that have room, by its bytes.
        crowding: those that wait, by how many of their messages do.
        line: the same, by whose turn it is.
    """

    def __init__(self) -> None:
        self.holding: Levels[T] = Levels()
        self.crowding: Levels[T] = Levels()
        self.line: FairLine[T] = FairLine()

    def put(self, thing: T, num_bytes: int, num_waiting: int, wanted: int) -> None:
        """Says what a thing has now, how many of its messages wait, and how much the next of those wants."""
        if num_bytes:
            self.holding.put(thing, num_bytes)
        else:
            self.holding.discard(thing)
        if num_waiting:
            self.crowding.put(thing, num_waiting)
            self.line.put(thing, wanted, num_bytes)
        else:
            self.crowding.discard(thing)
            self.line.discard(thing)


@dataclass(eq=False, slots=True)
class Member:
    """One connection's part.

    Attributes:
        num_bytes: of its rooms.
        rooms: of messages that have them, those of which something came last at the end.
        waiting: messages that have none, as they came.
    """

    num_bytes: int = 0
    rooms: OrderedDict[Room, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[Room, None] = field(default_factory=OrderedDict)

    def first(self) -> Room:
        """The next of those that wait; there must be one."""
        return next(iter(self.waiting))

    def last(self) -> Room:
        """The one of those that wait that came last; there must be one."""
        return next(reversed(self.waiting))


@dataclass(eq=False, slots=True)
class Group:
    """The part of connections that share one.

    Attributes:
        num_bytes: of all their rooms.
        num_waiting: messages of theirs that wait.
        ranks: the order of those that have or want something.
    """

    num_bytes: int = 0
    num_waiting: int = 0
    connections: dict[Sharer, Member] = field(default_factory=dict)
    ranks: Ranks[Member] = field(default_factory=Ranks)

    def first(self) -> Room:
        """The next of those that wait; there must be one."""
        return self.ranks.line.first().first()
