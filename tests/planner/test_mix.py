"""How many requests of a mix fit: exact against brute force, its bounds against it, and all against drawn sums."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pykv.planner import plan
from pykv.planner.capacity import Pool, requests_of_mix, requests_that_fit
from pykv.planner.lengths import LengthDistribution, read_context

SMALL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


def arrays(lengths: LengthDistribution, block_size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    return -(-lengths.tokens // block_size), lengths.counts


@pytest.mark.parametrize("capacity", [3, 7, 10, 16])
@pytest.mark.parametrize("risk", [0.01, 0.2, 0.5])
def test_exact_equals_brute_force(capacity: int, risk: float) -> None:
    costs, counts = np.array([1, 3, 6]), np.array([5, 3, 2])
    found = requests_of_mix(Pool(capacity * 8, 0, 8), costs * 8, counts, risk)
    chances = counts / counts.sum()
    most = 0
    for number in range(1, 8):
        passing = sum(
            float(np.prod(chances[list(drawn)]))
            for drawn in itertools.product(range(3), repeat=number)
            if costs[list(drawn)].sum() > capacity
        )
        if passing > risk + 1e-12:
            break
        most = number
    assert most < 7, "the search ended too early"
    assert (found.requests, found.method) == (most, "exact")


@pytest.mark.parametrize(
    "context",
    [
        "p50=200,p90=900,p99=3000,max=8000",
        "p50=2000,p90=8000,p99=30000,max=131072,mean=4000",
        "p50=100,p99=101,max=102",
    ],
)
@pytest.mark.parametrize("capacity", [9_999, 31_000])
def test_drawn_sums_pass_the_pool_as_rarely_as_promised(context: str, capacity: int) -> None:
    lengths = read_context(context, None)
    costs, counts = arrays(lengths)
    number = requests_of_mix(Pool(capacity * 64, 0, 64), costs * 64, counts, 0.01).requests
    assert number > 0
    random = np.random.default_rng(7)
    drawn = random.choice(costs, size=(4000, number + 1 + number // 10), p=counts / counts.sum())
    sums = np.cumsum(drawn, axis=1)
    passing = (sums[:, number - 1] > capacity).mean()
    assert passing <= 0.01 + 0.006  # three standard errors of 4,000 draws
    assert (sums[:, -1] > capacity).mean() > 0.01  # a tenth more is too many


def test_coarse_units_and_bound_never_promise_more_than_exact() -> None:
    lengths = read_context("p50=200,p90=900,p99=3000,max=8000", None)
    costs, counts = arrays(lengths)
    for capacity in (1000, 9_000, 30_000):
        exact = requests_of_mix(Pool(capacity * 64, 0, 64), costs * 64, counts, 0.01)
        other = requests_of_mix(Pool(capacity * 64, 0, 1), costs * 64, counts, 0.01)
        assert exact.method == "exact"
        assert other.method in ("rounded", "bound")
        assert 0.9 * exact.requests - 1 <= other.requests <= exact.requests


def test_large_pools_stay_safe_and_near_the_mean() -> None:
    lengths = read_context("p50=200,p90=900,p99=3000,max=8000", None)
    costs, counts = arrays(lengths)
    capacity = 10_000_000
    found = requests_of_mix(Pool(capacity * 64, 0, 64), costs * 64, counts, 0.01)
    mean = float(np.dot(costs, counts) / counts.sum())
    assert 0.98 * capacity / mean <= found.requests <= capacity / mean


def test_fixed_length_is_the_count_that_fits() -> None:
    pool = Pool(1000, 100)
    assert (
        requests_of_mix(pool, np.array([90]), np.array([1]), 0.01).requests
        == requests_that_fit(pool, 90)
        == 10
    )


def test_more_risk_never_fits_fewer() -> None:
    numbers = [
        (plan(**SMALL, num_blocks=3000, context="p50=200,p90=900,max=4000", risk=risk).requests or {})["mix"]
        for risk in (0.0001, 0.01, 0.1, 0.5)
    ]
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]


def test_nothing_fits_where_long_requests_are_too_common() -> None:
    found = requests_of_mix(Pool(100, 0, 10), np.array([10, 200]), np.array([95, 5]), 0.01)
    assert found.requests == 0
