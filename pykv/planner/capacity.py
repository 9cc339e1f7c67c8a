"""How many requests fit a pool: of one length, exactly; of a mix of lengths, at a stated risk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Mix", "Pool", "requests_of_mix", "requests_that_fit"]

MAX_UNITS = 2**15
"""Units into which a pool is parted for the sum of a mix; a pool of more blocks is taken in coarser units."""
NUM_SLOPES = 50
"""Slopes at which the bound on the tail is evaluated: each gives a bound that holds, the best one counts."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What can be given to requests.

    Attributes:
        usable_bytes: of all blocks but the null block.
        untouched_bytes: of those that an admission leaves free while others run (the scheduler's watermark).
        unit_bytes: what is given is always a multiple of this; 1: not known.
    """

    usable_bytes: int
    untouched_bytes: int = 0
    unit_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Mix:
    """How many requests of drawn lengths fit.

    Attributes:
        requests: the number.
        method: "exact": the sum's distribution, by convolution; "rounded": the same in coarser units, each request
            rounded up; "bound": by Chernoff's inequality. The last two give no more requests than the first would.
    """

    requests: int
    method: str


def requests_that_fit(pool: Pool, own_bytes: int, shared_bytes: int = 0) -> int:
    """How many requests of `own_bytes` each are admitted beside the blocks that they share, one after another."""
    room = pool.usable_bytes - shared_bytes
    if own_bytes > room:
        return 0
    return max(1, (room - pool.untouched_bytes) // own_bytes)


def requests_of_mix(
    pool: Pool, own_bytes: NDArray[np.int64], counts: NDArray[np.int64], risk: float, shared_bytes: int = 0
) -> Mix:
    """The most requests whose drawn lengths pass the pool, in sum, with a chance of at most `risk`.

    Args:
        pool: where they run.
        own_bytes: int64 [n], what a request of each length takes, above 0.
        counts: int64 [n], how often each length occurs.
        risk: the chance, above 0 and below 1.
        shared_bytes: of blocks that they all share.
    """
    room = pool.usable_bytes - shared_bytes - pool.untouched_bytes
    shares = counts / counts.sum()
    if len(own_bytes) == 1:
        fixed = Pool(pool.usable_bytes, pool.untouched_bytes)
        return Mix(requests_that_fit(fixed, int(own_bytes[0]), shared_bytes), "exact")
    if room <= 0:
        return Mix(0, "exact")
    num_units = room // pool.unit_bytes
    unit = pool.unit_bytes * -(-num_units // MAX_UNITS)
    summed = _by_convolution(-(-own_bytes // unit), shares, room // unit, risk)
    if unit == pool.unit_bytes and pool.unit_bytes > 1:
        return Mix(summed, "exact")
    bounded = _by_bound(own_bytes / room, shares, risk)
    return Mix(max(summed, bounded), "rounded" if summed >= bounded else "bound")


def _by_convolution(costs: NDArray[np.int64], shares: NDArray[np.float64], capacity: int, risk: float) -> int:
    """The most requests n with P(sum of n costs > capacity) ≤ risk.

    Distributions are kept up to `capacity` alone: what passes it once never comes back, costs being positive. Found by
    doubling, then by putting the doubled distributions together from the largest to the smallest.
    """
    size = _fast_size(2 * capacity + 1)

    def spectrum(distribution: NDArray[np.float64]) -> NDArray[np.complex128]:
        found: NDArray[np.complex128] = np.fft.rfft(distribution, size)
        return found

    def summed(spectra: NDArray[np.complex128]) -> NDArray[np.float64]:
        kept: NDArray[np.float64] = np.maximum(np.fft.irfft(spectra, size)[: capacity + 1], 0.0)
        return kept

    within = costs <= capacity
    one = np.bincount(costs[within], weights=shares[within], minlength=capacity + 1).astype(np.float64)
    if one.sum() < 1 - risk:
        return 0
    doubled, twice = [], one
    while twice.sum() >= 1 - risk:
        doubled.append(spectrum(twice))
        twice = summed(doubled[-1] ** 2)
    total, so_far = 1 << (len(doubled) - 1), doubled.pop()
    for power in reversed(range(len(doubled))):
        more = summed(so_far * doubled[power])
        if more.sum() >= 1 - risk:
            total, so_far = total + (1 << power), spectrum(more)
    return total


def _fast_size(least: int) -> int:
    """The next size of which the Fourier transform is fast: a small odd number times a power of two."""
    return min(odd << max(0, (-(-least // odd) - 1).bit_length()) for odd in (1, 3, 5, 9, 15))


def _by_bound(costs: NDArray[np.float64], shares: NDArray[np.float64], risk: float) -> int:
    """At least as safe: P(sum of n > 1) ≤ E[exp(s · cost)]^n · exp(-s) for every slope s, `costs` being parts of 1."""
    costs, places = np.unique(costs, return_inverse=True)
    shares = np.bincount(places, weights=shares).astype(np.float64)
    wide = np.geomspace(1e-2, 1e4, NUM_SLOPES) * -math.log(risk)
    best = int(np.argmax(_fitting(wide, costs, shares, risk)))
    near = np.geomspace(wide[max(0, best - 1)], wide[min(NUM_SLOPES - 1, best + 1)], NUM_SLOPES)
    most = float(_fitting(near, costs, shares, risk).max())
    return max(0, min(math.floor(most), math.floor(1 / float(np.dot(costs, shares)))))


def _fitting(
    slopes: NDArray[np.float64], costs: NDArray[np.float64], shares: NDArray[np.float64], risk: float
) -> NDArray[np.float64]:
    """For each slope how many requests its bound allows."""
    exponents = slopes[:, None] * costs[None, :]
    largest = exponents.max(axis=1)
    growth = largest + np.log(np.exp(exponents - largest[:, None]) @ shares)
    fitting: NDArray[np.float64] = (slopes + math.log(risk)) / growth
    return fitting
