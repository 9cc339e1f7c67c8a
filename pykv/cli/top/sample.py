"""What the server said at some moments, and what lies between two of them."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pykv.engine.histogram import HistogramCounts

__all__ = ["History", "Sample", "Span"]

NUM_KEPT = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment.

    Attributes:
        at: on the monotonic clock, in seconds.
        health: "SERVING" or "NOT_SERVING".
        counts, times: as `Client.get_counts_and_times` gives them.
    """

    at: float
    health: str
    counts: Mapping[str, int]
    times: Mapping[str, HistogramCounts]


@dataclass(frozen=True, slots=True)
class Span:
    """What happened between two moments; from the server's start where there is only one."""

    first: Sample | None
    last: Sample

    def rate(self, name: str) -> float | None:
        """How much a count grew a second; None where there is only one moment."""
        if self.first is None or self.last.at <= self.first.at:
            return None
        return self.grown(name) / (self.last.at - self.first.at)

    def grown(self, name: str) -> int:
        """How much a count grew."""
        before = 0 if self.first is None else self.first.counts[name]
        return self.last.counts[name] - before

    def times(self, name: str) -> HistogramCounts:
        """What was measured meanwhile; where that is nothing, what was measured at all."""
        latest = self.last.times[name]
        if self.first is None or self.first.times[name].bounds != latest.bounds:  # another server, since
            return latest
        between = latest.since(self.first.times[name])
        return between if between.num_values else latest


class History:
    """The last moments."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=NUM_KEPT)

    def add(self, sample: Sample) -> Span:
        """Takes one more moment and returns the time since the earliest that is kept.

        A server that was started anew begins anew here.
        """
        if self._samples and sample.counts["num_steps"] < self._samples[-1].counts["num_steps"]:
            self._samples.clear()
        self._samples.append(sample)
        first = self._samples[0] if len(self._samples) > 1 else None
        return Span(first, sample)
