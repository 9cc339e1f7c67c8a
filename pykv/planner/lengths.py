"""How long requests are: a distribution over whole numbers of tokens, in exact counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.field_checks import is_integer
from pykv.planner.checks import checked_count, refused, whole_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LengthDistribution", "read_context"]

NUM_QUANTILES = 10_000
"""Steps in which a distribution is drawn through given percentiles: each is one ten-thousandth of the requests."""
MOST_BENT, BISECTIONS = 200.0, 60
LARGEST_CONTEXT = 2**30
ALLOWED_CONTEXT = (
    "a number of tokens, or percentiles such as p50=2000,p90=8000,p99=16000, and mean=3100, max=32000"
)


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """Lengths and how often each occurs.

    Attributes:
        tokens: int64 [n], ascending, each once, at least 1.
        counts: int64 [n], above 0.
        source: where it is from, in words.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    source: str

    @classmethod
    def of(cls, tokens: NDArray[np.int64], counts: NDArray[np.int64], source: str) -> LengthDistribution:
        """Sorts and merges what occurs several times."""
        unique, places = np.unique(tokens, return_inverse=True)
        merged = np.zeros(len(unique), np.int64)
        np.add.at(merged, places, counts)
        return cls(unique[merged > 0], merged[merged > 0], source)

    @property
    def total(self) -> int:
        """The sum of the counts."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean length, in tokens."""
        return float(np.dot(self.tokens.astype(np.float64), self.counts) / self.total)

    @property
    def is_fixed(self) -> bool:
        """Whether all requests have one length."""
        return len(self.tokens) == 1

    def percentile(self, percent: float) -> int:
        """The least length that at least `percent` of the requests do not pass."""
        needed = math.ceil(percent * self.total / 100 - 1e-9)
        place = int(np.searchsorted(np.cumsum(self.counts), needed))
        return int(self.tokens[min(place, len(self.tokens) - 1)])

    def capped(self, cap: int) -> LengthDistribution:
        """The distribution where what is longer than `cap` ends there."""
        return LengthDistribution.of(np.minimum(self.tokens, cap), self.counts, self.source)

    def share_beyond(self, cap: int) -> float:
        """The share of requests that are longer than `cap`."""
        return float(self.counts[self.tokens > cap].sum() / self.total)


def read_context(context: object, max_model_len: int | None) -> LengthDistribution:
    """Reads a length, or percentiles of lengths.

    Through percentiles the distribution is drawn on the safe side: between two of them, and to the maximum, along the
    straight line, which lies above the lengths where fewer and fewer requests are longer and longer; below the first
    all are as long as the first. A mean, if given, is met: the lines hang as far as it asks for.

    Args:
        context: a whole number, a text, or a mapping from "p50", "mean", "max" and the like to tokens.
        max_model_len: the cap, which is the maximum where none is given.

    Raises:
        ConfigError: it is none of these, the percentiles fall, or the mean cannot be theirs.
    """
    points = _points(context)
    if isinstance(points, int):
        return LengthDistribution(
            np.array([points], np.int64), np.array([1], np.int64), f"{points:,} tokens each"
        )
    mean, maximum = points.pop("mean", None), points.pop("max", None)
    percents = sorted((_percent(context, name), tokens) for name, tokens in points.items())
    if maximum is not None:
        percents.append((100.0, maximum))
    if len({percent for percent, _ in percents}) < len(percents):
        raise refused("context", context, "each percentile once, max being p100")
    if not percents:
        raise refused(
            "context",
            context,
            "at least one percentile beside the mean, since long requests decide: p90=8000",
        )
    if percents[-1][0] < 100:
        if max_model_len is None:
            raise refused(
                "context", context, "percentiles with max=TOKENS or p100, or with max_model_len given"
            )
        percents.append((100.0, max(max_model_len, percents[-1][1])))
    if any(later[1] < earlier[1] for earlier, later in pairwise(percents)):
        raise refused("context", context, f"percentiles that rise; here they are {_shown(percents)}")
    tokens = _quantiles(percents, mean, context)
    return LengthDistribution.of(tokens, np.ones(len(tokens), np.int64), f"percentiles {_shown(percents)}")


def _points(context: object) -> int | dict[str, int]:
    if is_integer(context):
        return checked_count("context", context, 1, LARGEST_CONTEXT)
    if isinstance(context, str):
        if (number := whole_number(context)) is not None:
            return checked_count("context", number, 1, LARGEST_CONTEXT)
        pairs = [part.partition("=") for part in context.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise refused("context", context, "each percentile once, max being p100")
        return {name.strip(): _tokens(context, value) for name, _, value in pairs}
    if isinstance(context, Mapping):
        return {str(name): _tokens(context, value) for name, value in context.items()}
    raise refused("context", context, ALLOWED_CONTEXT)


def _tokens(context: object, value: Any) -> int:
    number = whole_number(value) if isinstance(value, str) else value
    if not is_integer(number) or not 1 <= number <= LARGEST_CONTEXT:
        raise refused("context", context, ALLOWED_CONTEXT)
    return int(number)


def _percent(context: object, name: str) -> float:
    try:
        percent = float(name.removeprefix("p")) if name.startswith("p") else -1.0
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise refused("context", context, ALLOWED_CONTEXT)
    return percent


def _quantiles(percents: list[tuple[float, int]], mean: int | None, context: object) -> NDArray[np.int64]:
    """The lengths of NUM_QUANTILES requests, in order."""
    at = (np.arange(1, NUM_QUANTILES + 1) * (100.0 / NUM_QUANTILES)).astype(np.float64)
    ends = np.array([0.0, *(percent for percent, _ in percents)])
    known = np.array([1.0, *(float(tokens) for _, tokens in percents)])
    between = np.clip(np.searchsorted(ends, at - 1e-9), 1, len(known) - 1)
    low, high = known[between - 1], known[between]
    place = (at - ends[between - 1]) / (ends[between] - ends[between - 1])  # above 0, up to 1

    def bent(exponent: float) -> NDArray[np.float64]:
        """0: all as long as the next percentile; 1: straight lines; above: hanging down to the percentile before."""
        drawn: NDArray[np.float64] = low + (high - low) * place**exponent
        return drawn

    safest = np.where(between == 1, high, bent(1.0))
    lengths = safest if mean is None else bent(_exponent(bent, mean, context))
    rounded: NDArray[np.int64] = np.ceil(lengths - 1e-6).astype(np.int64)
    return rounded


def _exponent(bent: Callable[[float], NDArray[np.float64]], mean: int, context: object) -> float:
    """How far the lines hang so that the mean is met."""
    most, least = float(bent(0.0).mean()), float(bent(MOST_BENT).mean())
    if not least <= mean <= most:
        raise refused(
            "context", context, f"a mean from {least:,.0f} to {most:,.0f} tokens with these percentiles"
        )
    low, high = 0.0, MOST_BENT
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if bent(middle).mean() > mean else (low, middle)
    return low


def _shown(percents: list[tuple[float, int]]) -> str:
    return ", ".join(f"p{percent:g}={tokens}" for percent, tokens in percents)
