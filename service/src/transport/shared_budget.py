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
    """A connection may have as much as is left to its group, and a group as much as is left to all.

    So one connection alone has about a third and one group half, and who comes next finds some. A group is the
    connection's peer, unless who takes something names another one. What is a connection's own nobody else can take.

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
        self._of_group: Counter[str] = Counter()
        self._of_sharer: Counter[tuple[Sharer, str]] = Counter()
        self.num_taken = 0

    def take(self, sharer: Sharer, number: int, group: str | None = None) -> bool:
        """Takes so much for a connection, until it gives it back; False = that is more than it may have.

        Args:
            group: with whom the connection shares this; None = with its peer.
        """
        key = sharer, sharer.peer if group is None else group
        before = self._of_sharer.get(key, 0)
        after = before + number
        left = self._most - self.num_taken - self._of_group.get(key[1], 0)
        if self._most_of_one is not None and after > self._most_of_one:
            return False
        if self._counted(after) > max(left, 0):
            return False
        self._change(key, before, after)
        return True

    def give_back(self, sharer: Sharer, number: int, group: str | None = None) -> None:
        """The connection has so much less, of what it took with the same group."""
        key = sharer, sharer.peer if group is None else group
        before = self._of_sharer[key]
        self._change(key, before, before - number)

    def _change(self, key: tuple[Sharer, str], before: int, after: int) -> None:
        number = self._counted(after) - self._counted(before)
        self.num_taken += number
        self._of_group[key[1]] += number
        self._of_sharer[key] = after
        if not after:
            del self._of_sharer[key]
        if not self._of_group[key[1]]:
            del self._of_group[key[1]]

    def _counted(self, number: int) -> int:
        return max(number - self._of_its_own, 0)
