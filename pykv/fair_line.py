"""Whose turn it is, so that all who wait get as much."""

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["FairLine"]

T = TypeVar("T", bound=Hashable)
Tag = tuple[int, int]  # of how much one has, the order of magnitude; where ends what it wants


class FairLine(Generic[T]):
    """Those who wait: who has least is next, to the order of magnitude, and then by fair queueing.

    By that whoever wants much has its turn once each of the others could have got as much in smaller parts; a clock
    goes on by what was given divided by those that waited (Bennett and Zhang, 1996). What it does takes about the same
    time however many wait.
    """

    def __init__(self) -> None:
        self._clock = 0  # what each might have got
        self._begins: dict[T, int] = {}  # where begins what each wants
        self._tags: dict[T, Tag] = {}  # of those that wait
        self._heap: list[tuple[Tag, int, T]] = []  # theirs, and such as are theirs no longer
        self._order = count()

    def __len__(self) -> int:
        return len(self._tags)

    def put(self, thing: T, has: int, wants: int) -> None:
        """Says how much one has and how much it wants next; it may wait already."""
        if thing not in self._tags:
            self._begins[thing] = max(self._clock, self._begins.get(thing, 0))
        tag = has.bit_length(), self._begins[thing] + wants
        if self._tags.get(thing) != tag:
            self._tags[thing] = tag
            heapq.heappush(self._heap, (tag, next(self._order), thing))
            if len(self._heap) > 2 * len(self._tags) + 16:
                self._heap = [entry for entry in self._heap if self._is_there(entry)]
                heapq.heapify(self._heap)

    def serve(self, thing: T) -> None:
        """One who waits gets what it wants."""
        num_waiting = len(self)
        ends = self._tags.pop(thing)[1]
        self._clock += (ends - self._begins[thing]) // num_waiting + 1
        self._begins[thing] = ends

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
        return self._heap[0][2]

    def _is_there(self, entry: tuple[Tag, int, T]) -> bool:
        tag, _, thing = entry
        return self._tags.get(thing) == tag
