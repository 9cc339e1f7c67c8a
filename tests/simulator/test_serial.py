"""One request at a time: hit rates, their bounds, and policies of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pykv
from pykv.simulator.replay import Replayer
from pykv.simulator.sweep import sweep
from pykv.simulator.trace import read_trace

WriteTrace = Callable[..., Path]

EXAMPLE = Path(__file__).parents[2] / "examples/traces/agents.jsonl"
# name: different blocks, what a cache that forgets nothing finds, (blocks, lru, dead, opt) ...
KNOWN = {
    "mooncake_conversation": (
        182_790,
        ".366",
        [(1827, ".052", ".127", ".240"), (9139, ".196", ".366", ".366"), (18_279, ".279", ".366", ".366")],
    ),
    "weka_mix150_b512": (
        78_679,
        ".964",
        [(786, ".251", ".257", ".388"), (1573, ".495", ".507", ".644"), (3933, ".832", ".849", ".896")],
    ),
    "lmcache_miniswe": (
        9493,
        ".937",
        [(949, ".607", ".607", ".607"), (1898, ".751", ".751", ".756")],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_hit_rates_of_public_traces_are_found_to_three_digits(name: str, public_traces: Path) -> None:
    num_blocks, infinite, capacities = KNOWN[name]
    replayer = Replayer(read_trace(public_traces / f"{name}.jsonl.gz"))
    assert replayer.run(serial=True, num_blocks="100%").num_blocks == num_blocks
    for capacity, *expected in capacities:
        results = [
            replayer.run(serial=True, num_blocks=capacity, policy=policy) for policy in ("lru", "dead", "opt")
        ]
        assert [f"{result.hit_rate_blocks:.3f}"[1:] for result in results] == expected
        assert {f"{result.hit_rate_infinite:.3f}"[1:] for result in results} == {infinite}
        assert {f"{result.hit_rate_opt:.3f}"[1:] for result in results} == {expected[-1]}


class LeastRecent:
    """What the tree does, in Python."""

    def rank(self, use: pykv.BlockUse) -> int:
        return use.request


class Misfit:
    """Returns whatever it was made with."""

    def __init__(self, ranks: object) -> None:
        self.ranks = ranks

    def rank(self, use: pykv.BlockUse) -> object:
        return self.ranks


@pytest.mark.parametrize("num_blocks", ["3%", "12%", "35%"])
def test_least_recently_used_in_python_is_the_production_tree(num_blocks: str) -> None:
    mine = pykv.replay(EXAMPLE, serial=True, num_blocks=num_blocks, policy=LeastRecent())
    lru = pykv.replay(EXAMPLE, serial=True, num_blocks=num_blocks)
    assert (mine.hit_rate_blocks, mine.hit_rate_tokens, mine.evictions) == (
        lru.hit_rate_blocks,
        lru.hit_rate_tokens,
        lru.evictions,
    )
    assert mine.policy == "LeastRecent"


def test_a_policy_is_told_what_was_used_and_found(write_trace: WriteTrace) -> None:
    seen: list[tuple[int, list[int], int]] = []

    class Spy:
        def rank(self, use: pykv.BlockUse) -> float:
            seen.append((use.request, use.blocks.tolist(), use.num_found))
            return 0.0

    path = write_trace([(0, 40, 1, None, [[0, 3]]), (1, 40, 1, None, [[0, 2], [7, 1]])])
    pykv.replay(path, serial=True, num_blocks=2, policy=Spy())
    assert seen == [(0, [0, 1], 0), (1, [0, 1], 2)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], "does not fit"),
        ([1.0], "does not fit"),
        (None, "NaN"),
        (np.nan, "NaN"),
        ("high", "gives no numbers"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks: object, message: str, write_trace: WriteTrace) -> None:
    path = write_trace([(0, 40, 1, None, [[0, 3]])])
    with pytest.raises(pykv.ConfigError, match=message):
        pykv.replay(path, serial=True, num_blocks=3, policy=Misfit(ranks))


def test_knowledge_is_worth_something_and_the_bounds_hold() -> None:
    replayer = Replayer(read_trace(EXAMPLE))
    lru, ends, dead, best = (
        replayer.run(serial=True, num_blocks="12%", policy=policy).hit_rate_blocks
        for policy in ("lru", "session_end", "dead", "opt")
    )
    assert lru < ends <= dead < best < replayer.run(serial=True, num_blocks="12%").hit_rate_infinite


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 10**9}, "num_blocks is 1000000000: allowed is an integer from 1 to 67108864"),
        ({"num_blocks": "x%"}, "num_blocks is 'x%'"),
        ({"num_blocks": "0%"}, "num_blocks is '0%'"),
        ({}, "allowed is one of them"),
        ({"num_blocks": 8, "kv_memory_bytes": 8}, "allowed is one of them"),
        (
            {"num_blocks": 8, "policy": "fifo"},
            "policy is 'fifo': allowed is one of lru, segmented_lru, session_end, session_idle, dead, opt",
        ),
        ({"num_blocks": 8, "max_num_seqs": 2}, "max_num_seqs: not allowed with serial"),
        ({"num_blocks": 8, "policy": object()}, "policy is <object .* or an object with a method rank"),
        ({"num_blocks": 8, "policy": LeastRecent}, "policy is <class .* or an object with a method rank"),
        ({"num_blocks": 8, "block_size": 48}, "block_size is 48: allowed is a divisor"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(pykv.ConfigError, match=message):
        pykv.replay(EXAMPLE, serial=True, **options)


def test_the_pool_can_be_given_in_bytes() -> None:
    sizes = {
        dtype: pykv.replay(
            EXAMPLE, serial=True, kv_memory_bytes=64 * 1000 * 100, kv_bytes_per_token=1000, kv_dtype=dtype
        ).num_blocks
        for dtype in ("float32", "bfloat16", "fp8")
    }
    assert sizes == {"float32": 50, "bfloat16": 100, "fp8": 193}  # 4 bytes of scale to 128


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"allocator": "contiguous"}, "allocator"),
        ({"cost": "constant:1"}, "cost"),
        ({"speed": 1.0}, "speed"),
        ({"concurrency": 4}, "concurrency"),
        ({"knows_outputs": True}, "knows_outputs"),
        ({"watermark": 0.0, "max_num_seqs": 2}, "watermark, max_num_seqs"),
        ({"serial": False, "speed": 1.0, "concurrency": 4}, "speed"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"kv_bytes_per_token": 1000}, "kv_bytes_per_token"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, object], name: str) -> None:
    with pytest.raises(pykv.ConfigError, match=f"^{name}: not allowed with"):
        pykv.replay(EXAMPLE, **{"serial": True, "num_blocks": 8, **options})


class Counting:
    """A policy with a state: what it was asked before decides."""

    def __init__(self) -> None:
        self.num_uses = 0

    def rank(self, use: pykv.BlockUse) -> int:
        self.num_uses += 1
        return self.num_uses * 7919 % 101


def test_each_replay_of_a_sweep_has_a_policy_of_its_own() -> None:
    trace = read_trace(EXAMPLE)
    sizes = [200, 400, 800, 200]
    policy = Counting()
    points = sweep(trace, {"num_blocks": sizes}, options={"serial": True, "policy": policy})
    alone = [pykv.replay(trace, serial=True, policy=Counting(), num_blocks=size) for size in sizes]
    assert [point.result.hit_rate_blocks for point in points] == [one.hit_rate_blocks for one in alone]
    assert policy.num_uses == 0
