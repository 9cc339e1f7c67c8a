"""A number of something that all connections share, so that nobody can take it all."""

from collections import Counter
from dataclasses import dataclass

__all__ = ["SharedBudget", "Sharer"]


@dataclass(frozen=True, slots=True, eq=False)
class Sharer:
    """One connection, as those know it that share something among connections.

    Args:
        peer: whose connection it is, as `peer_of` names it.
    """

    peer: str


class SharedBudget:
    """A connection may have as much as is left to its peer, and a peer as much as is left to all.

    So one connection alone has about a third and one peer half, and who comes next finds some. What is a connection's
    own nobody else can take.

    Args:
        most: of all connections together, beside what is each one's own.
        most_of_one: of a connection, however much is left; None = no such limit.
        of_its_own: so much each connection may have in any case; it is not counted.

    Attributes:
        num_taken: of all, beside what is each one's own.
    """

    def __init__(self, most: int, most_of_one: int | None = None, of_its_own: int = 0) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._of_its_own = of_its_own
        self._of_peer: Counter[str] = Counter()
        self._of_sharer: Counter[Sharer] = Counter()
        self.num_taken = 0

    def take(self, sharer: Sharer, number: int) -> bool:
        """Takes so much for a connection, until it gives it back; False = that is more than it may have."""
        before = self._of_sharer.get(sharer, 0)
        after = before + number
        left = self._most - self.num_taken - self._of_peer.get(sharer.peer, 0)
        if self._most_of_one is not None and after > self._most_of_one:
            return False
        if self._counted(after) > max(left, 0):
            return False
        self._change(sharer, before, after)
        return True

    def give_back(self, sharer: Sharer, number: int) -> None:
        """The connection has so much less."""
        before = self._of_sharer[sharer]
        self._change(sharer, before, before - number)

    def _change(self, sharer: Sharer, before: int, after: int) -> None:
        number = self._counted(after) - self._counted(before)
        self.num_taken += number
        self._of_peer[sharer.peer] += number
        self._of_sharer[sharer] = after
        if not after:
            del self._of_sharer[sharer]
        if not self._of_peer[sharer.peer]:
            del self._of_peer[sharer.peer]

    def _counted(self, number: int) -> int:
        return max(number - self._of_its_own, 0)
