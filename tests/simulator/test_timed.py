"""Virtual time: latencies that can be counted, memory in blocks and in one piece, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pykv
from pykv.simulator.replay import Replayer
from pykv.simulator.result import Percentiles
from pykv.simulator.sweep import sweep
from pykv.simulator.trace import read_trace

WriteTrace = Callable[..., Path]

TRACES = Path(__file__).parents[2] / "examples/traces"
SECOND = pykv.CostModel(fixed=1.0)


def test_a_request_alone_gets_a_token_a_step(write_trace: WriteTrace) -> None:
    path = write_trace([(0, 20, 4, None, [[0, 2]])])
    timed = pykv.replay(path, num_blocks=4, cost=SECOND).timed
    assert timed is not None
    assert (timed.seconds, timed.steps, timed.computed_tokens) == (4.0, 4, 23)
    assert timed.ttft == Percentiles(1.0, 1.0, 1.0, 1.0, 1.0)
    assert timed.tpot.p99 == 1.0
    assert timed.output_tokens_per_second == 1.0
    # Decodes hold 21, 22, 23 tokens in two blocks of 16.
    assert timed.waste == 1 - (21 + 22 + 23) / (3 * 32)


def test_percentiles_lie_between_requests_in_proportion(write_trace: WriteTrace) -> None:
    path = write_trace([(float(10 * i), 8, 1 + i, None, None) for i in range(5)])
    timed = pykv.replay(path, num_blocks=4, cost=SECOND).timed
    assert timed is not None
    assert timed.latency == Percentiles(3.0, 3.0, pytest.approx(4.6), pytest.approx(4.8), pytest.approx(4.96))


def test_a_prefix_is_found_and_lookups_have_reasons(write_trace: WriteTrace) -> None:
    path = write_trace(
        [(0, 33, 1, None, [[0, 3]]), (9, 33, 1, None, [[0, 2], [9, 1]]), (18, 40, 1, None, [[20, 3]])]
    )
    result = pykv.replay(path, num_blocks=20, cost=SECOND)
    assert result.timed is not None
    lookups = result.timed.lookups
    assert (lookups.hit, lookups.never_seen, lookups.evicted, lookups.last) == (2, 4, 0, 3)
    assert result.hit_rate_tokens == 32 / 106


def test_azure_conversations_waste_what_is_known(public_traces: Path) -> None:
    replayer = Replayer(read_trace(public_traces / "azure2023_conv.jsonl.gz"))
    wasted = {}
    for allocator in ("contiguous", "contiguous-exact", "paged"):
        timed = replayer.run(num_blocks=40 * 1024, max_model_len=16_384, allocator=allocator).timed
        assert timed is not None
        assert timed.refused == 0
        wasted[allocator] = timed.waste
    assert wasted["contiguous"] == pytest.approx(0.92, abs=0.01)
    assert wasted["contiguous-exact"] == pytest.approx(0.12, abs=0.005)
    assert wasted["paged"] == pytest.approx(0.006, abs=0.0005)


def test_blocks_serve_more_at_once_than_one_piece_for_each() -> None:
    replayer = Replayer(read_trace(TRACES / "chats.csv"))
    piece, paged = (
        replayer.run(num_blocks=4096, max_model_len=16_384, allocator=allocator).timed
        for allocator in ("contiguous", "paged")
    )
    assert piece is not None
    assert paged is not None
    assert piece.max_running == 4
    assert piece.external_fragmentation >= 0
    assert paged.max_running > 8
    assert paged.queue.p50 < piece.queue.p50


def test_a_small_pool_preempts_and_says_what_it_cost() -> None:
    options = {"num_blocks": 1200, "admission": "watermark", "watermark": 0.0, "speed": 4.0}
    timed = pykv.replay(TRACES / "chats.csv", **options).timed
    assert timed is not None
    assert timed.preemptions >= timed.preempting_steps > 0
    assert timed.recomputed_tokens > 0
    assert timed.stalled_seconds > 0
    swapping = pykv.replay(TRACES / "chats.csv", **options, preemption="swap", num_host_blocks=4000).timed
    assert swapping is not None
    assert swapping.swapped_blocks > 0
    assert swapping.recomputed_tokens < timed.recomputed_tokens


def test_the_host_serves_what_preemption_took() -> None:
    options = {"num_blocks": 1200, "admission": "watermark", "watermark": 0.0, "speed": 4.0}
    with_host = pykv.replay(TRACES / "chats.csv", **options, preemption="swap", num_host_blocks=4000).timed
    without = pykv.replay(TRACES / "chats.csv", **options).timed
    assert with_host is not None
    assert without is not None
    assert with_host.hit_rate_host > 0.9
    assert with_host.swapped_in_blocks == with_host.swapped_blocks / 2
    assert without.hit_rate_host == 0.0
    # A copy takes time, and the scheduler weighs it against computing again.
    auto = {**options, "num_host_blocks": 4000}
    slow = pykv.replay(
        TRACES / "chats.csv", **auto, cost="roofline:H100,model=llama-3.1-8b,host_bandwidth=1e6"
    )
    assert slow.timed is not None
    assert slow.timed.swapped_blocks == 0


def test_what_is_refused_or_cut_is_counted_and_not_looked_up(write_trace: WriteTrace) -> None:
    first = (0.0, 64, 40, None, [[0, 4]])
    path = write_trace([first, (9.0, 64, 4, None, [[0, 4]]), (10.0, 640, 4, None, [[100, 40]])])
    found = pykv.replay(path, num_blocks=12, max_model_len=80, cost="constant:0.1")
    timed = found.timed
    assert timed is not None
    assert (timed.refused, timed.cut, timed.cut_tokens) == (1, 1, 24)
    assert found.hit_rate_tokens == timed.hit_rate_device == 48 / 128


def test_policies_and_what_is_told_of_sessions_change_what_is_found() -> None:
    replayer = Replayer(read_trace(TRACES / "agents.jsonl"))
    rates = {
        retention: replayer.run(num_blocks=400, retention=retention).hit_rate_blocks
        for retention in ("none", "session_end", "next_turn", "session_idle", "ttl:5")
    }
    assert rates["session_end"] > rates["none"]
    assert rates["next_turn"] > rates["none"]
    assert len(set(rates.values())) >= 3
    lru, segmented = (replayer.run(num_blocks=400, policy=name) for name in ("lru", "segmented_lru"))
    assert lru.hit_rate_blocks != segmented.hit_rate_blocks
    assert (segmented.policy, replayer.run(num_blocks=400, retention="ttl:60").retention) == (
        "segmented_lru",
        "ttl:60",
    )


def test_what_was_not_given_is_said() -> None:
    default = pykv.replay(TRACES / "chats.csv", num_blocks=900)
    assert default.assumed == ("a step costs what roofline:H100,model=llama-3.1-8b says",)
    assert default.to_json()["assumed"] == default.assumed
    assert pykv.replay(TRACES / "chats.csv", num_blocks=900, cost="constant:1").assumed == ()


def test_more_load_means_longer_waiting() -> None:
    replayer = Replayer(read_trace(TRACES / "chats.csv"))
    reports = [replayer.run(num_blocks=1500, concurrency=concurrency).timed for concurrency in (2, 8, 64)]
    assert [report.max_running <= 64 for report in reports if report]
    waits = [report.ttft.p50 for report in reports if report]
    assert waits == sorted(waits)
    assert reports[0] is not None
    assert reports[0].max_running == 2


@pytest.mark.parametrize("name", ["agents.jsonl", "chats.csv"])
def test_the_same_trace_gives_the_same_bytes(name: str) -> None:
    first, second = (
        json.dumps(pykv.replay(TRACES / name, num_blocks=900).to_json(with_series=True)) for _ in range(2)
    )
    assert first == second
    assert len(first) > 1000


def test_a_sweep_is_its_replays_in_order_and_tells_how_far_it_is() -> None:
    trace = read_trace(TRACES / "agents.jsonl")
    told: list[tuple[int, int]] = []
    grid = {"num_blocks": [200, 400], "speed": [1.0, 2.0]}
    points = sweep(trace, grid, on_done=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [tuple(point.options.values()) for point in points] == [
        (200, 1.0),
        (200, 2.0),
        (400, 1.0),
        (400, 2.0),
    ]
    assert points[1].result == Replayer(trace).run(num_blocks=200, speed=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"allocator": "buddy"},
            "allocator is 'buddy': allowed is one of paged, contiguous, contiguous-exact",
        ),
        ({"policy": "opt"}, "policy is 'opt': in virtual time allowed are 'lru' and 'segmented_lru'"),
        ({"speed": 0.0}, "speed is 0"),
        ({"retention": "for ever"}, "retention is for ever: allowed is none, session_end"),
        ({"retention": "ttl:-3"}, "retention is ttl:-3"),
        ({"retention": "session_idle", "concurrency": 4}, "retention is a rule of times"),
        ({"retention": 3}, "retention is 3: allowed is the name of a rule"),
        ({"knows_outputs": 1}, "knows_outputs is 1: allowed is True or False"),
        ({"allocator": "contiguous", "watermark": 0.1}, "watermark: not allowed with allocator 'contiguous'"),
        ({"allocator": "contiguous", "policy": "segmented_lru"}, "policy: not allowed with allocator"),
        ({"allocator": "contiguous-exact", "policy": "lru"}, "policy: not allowed with allocator"),
        (
            {"allocator": "contiguous-exact", "knows_outputs": True},
            "knows_outputs: not allowed with allocator",
        ),
        (
            {"allocator": "contiguous", "num_host_blocks": 9, "preemption": "swap"},
            "num_host_blocks, preemption: not",
        ),
        (
            {"allocator": "contiguous", "admission": "watermark", "max_passes": 0},
            "admission, max_passes: not",
        ),
        ({"allocator": "contiguous", "max_chunk_tokens": 9}, "max_chunk_tokens: not"),
        ({"allocator": "contiguous", "retention": "none"}, "retention: not"),
        ({"speed": 1e300}, r"speed is 1e\+300: allowed is a number from 1e-06 to 1e\+06"),
        ({"speed": float("nan")}, "speed is nan"),
        ({"cost": 3}, "cost is 3: allowed is a CostModel, or a text"),
        ({"policy": object()}, "policy is <object"),
        ({"speed": "fast"}, "speed is 'fast'"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"block_size": -16}, "block_size is -16"),
        ({"cost": "free"}, "cost is 'free'"),
        ({"cost": pykv.CostModel()}, "a step takes at least 1 ns"),
        ({"max_seqs": 3}, "max_seqs is no option of a replay; near ones: max_num_seqs"),
        ({"admission": "always"}, "admission is 'always'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(pykv.ConfigError, match=message):
        pykv.replay(TRACES / "chats.csv", **{"num_blocks": 900, **options})
