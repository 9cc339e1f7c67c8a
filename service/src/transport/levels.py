"""Things in the order of how much they have."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Levels"]

T = TypeVar("T", bound=Hashable)


class Levels(Generic[T]):
    """Things by the order of magnitude, to the base of two, of what each has; those of one level as they came to it.

    What it does, but for going through several, takes the same time however many there are.
    """

    def __init__(self) -> None:
        self._level_of: dict[T, int] = {}
        self._things: dict[int, OrderedDict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def put(self, thing: T, amount: int) -> None:
        """Says how much a thing, which may be a new one, has now."""
        level = amount.bit_length()
        if self._level_of.get(thing) != level:
            self.discard(thing)
            self._level_of[thing] = level
            self._things.setdefault(level, OrderedDict())[thing] = None

    def discard(self, thing: T) -> None:
        """Forgets a thing, if it is there."""
        level = self._level_of.pop(thing, None)
        if level is None:
            return
        things = self._things[level]
        del things[thing]
        if not things:
            del self._things[level]

    def above(self, amount: int) -> Iterator[T]:
        """Those of a higher level than `amount`, whoever has most first; nothing may change meanwhile."""
        for level in sorted(self._things, reverse=True):
            if level > amount.bit_length():
                yield from self._things[level]
