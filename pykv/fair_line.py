"""Whose turn it is, so that all who wait get as much."""

import heapq
from collections.abc import Generator, Hashable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["FairLine"]

T = TypeVar("T", bound=Hashable)
Tag = tuple[int, int, int]
"""Of what one has, the order of magnitude; where what it wants ends; when it said so."""


class FairLine(Generic[T]):
    """Those who wait: whoever has least is next, to the order of magnitude, and then by fair queueing, so that whoever
    wants much has its turn once each of the others could have got as much in smaller parts.

    A clock goes on by what was given divided by those that waited; what one wants begins where what it got ends, or at
    the clock if that is later, and whose ends first is next. What it does takes about the same time however many wait.
    """

    def __init__(self) -> None:
        self._clock = 0  # what each might have got
        self._begins: dict[T, int] = {}  # where what each wants begins
        self._tags: dict[T, Tag] = {}  # of those that wait
        self._heap: list[tuple[Tag, T]] = []  # theirs, and such as are theirs no longer
        self._count = count()

    def __len__(self) -> int:
        return len(self._tags)

    def put(self, thing: T, wants: int, has: int = 0) -> None:
        """Says how much one wants next, which may wait already, and how much it has."""
        if thing not in self._tags:
            self._begins[thing] = max(self._clock, self._begins.get(thing, 0))
        ends = self._begins[thing] + wants
        level = has.bit_length()
        if thing in self._tags and self._tags[thing][:2] == (level, ends):
            return
        tag = self._tags[thing] = level, ends, next(self._count)
        heapq.heappush(self._heap, (tag, thing))
        if len(self._heap) > 2 * len(self._tags) + 16:
            self._heap = [entry for entry in self._heap if self._is_there(entry)]
            heapq.heapify(self._heap)

    def serve(self, thing: T, amount: int) -> None:
        """One who waits gets so much, and wants nothing more until it says so."""
        self._clock += amount // len(self) + 1
        self._begins[thing] += amount
        del self._tags[thing]

    def discard(self, thing: T) -> None:
        """Has one wait no longer, if it does; what it got is remembered."""
        self._tags.pop(thing, None)

    def forget(self, thing: T) -> None:
        """Has one wait no longer, and begin anew when it comes again."""
        self._tags.pop(thing, None)
        self._begins.pop(thing, None)

    def first(self) -> T:
        """Whose turn it is; somebody must wait."""
        while not self._is_there(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def ends(self, thing: T) -> int:
        """Where, by the clock, what one who waits wants ends."""
        return self._tags[thing][1]

    def in_order(self) -> Generator[T]:
        """Those who wait, whose turn it is first; nothing may change until it is closed."""
        passed = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._is_there(entry):
                    passed.append(entry)
                    yield entry[1]
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)

    def _is_there(self, entry: tuple[Tag, T]) -> bool:
        tag, thing = entry
        return self._tags.get(thing) == tag
