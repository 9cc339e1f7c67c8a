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

    So one connection alone has about a third and one peer half, and who comes next finds some.

    Args:
        most: of all connections together.
        most_of_one: of a connection, however much is left; None = no such limit.

    Attributes:
        num_taken: of all.
    """

    def __init__(self, most: int, most_of_one: int | None = None) -> None:
        self._most = most
        self._most_of_one = most if most_of_one is None else most_of_one
        self._of_peer: Counter[str] = Counter()
        self._of_sharer: Counter[Sharer] = Counter()
        self.num_taken = 0

    def take(self, sharer: Sharer, number: int) -> bool:
        """Takes so much for a connection, until it gives it back; False = that is more than it may have."""
        left = self._most - self.num_taken - self._of_peer[sharer.peer]
        if self._of_sharer[sharer] + number > min(left, self._most_of_one):
            self._forget_empty(sharer)
            return False
        self.num_taken += number
        self._of_peer[sharer.peer] += number
        self._of_sharer[sharer] += number
        return True

    def give_back(self, sharer: Sharer, number: int) -> None:
        """The connection has so much less."""
        self.num_taken -= number
        self._of_peer[sharer.peer] -= number
        self._of_sharer[sharer] -= number
        self._forget_empty(sharer)

    def _forget_empty(self, sharer: Sharer) -> None:
        if not self._of_sharer[sharer]:
            del self._of_sharer[sharer]
        if not self._of_peer[sharer.peer]:
            del self._of_peer[sharer.peer]
