"""Counts of values by buckets, cheap enough for each token."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """What a histogram held at one moment.

    Attributes:
        bounds: upper bounds of the buckets, ascending; one more bucket has none.
        counts: values in each bucket, [len(bounds) + 1], none counted twice.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def since(self, earlier: HistogramCounts) -> HistogramCounts:
        """What was counted after `earlier` was taken of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return HistogramCounts(self.bounds, counts, self.total - earlier.total)

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The value that `share` of all values do not pass, interpolated in its bucket; 0 where there is none.

        Values beyond the last bound count as that bound.
        """
        rank, passed = share * self.num_values, 0
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and passed + count >= rank:
                return lower + (bound - lower) * max(rank - passed, 0.0) / count
            passed += count
            lower = bound
        return lower if passed < self.num_values else 0.0


class Histogram:
    """Counts values; from any thread."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts one value: in the first bucket whose bound it does not pass."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def counts(self) -> HistogramCounts:
        """What was counted so far."""
        with self._lock:
            return HistogramCounts(self._bounds, tuple(self._counts), self._total)
