"""What a plan promises is what the real allocator and the real scheduler admit: that many, and not one more."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykv import BlockPool, KvLayout, OutOfBlocksError, Scheduler, SchedulerConfig, StepBuffers, replay
from pykv.layer_groups import LayerGroups
from pykv.planner import plan
from pykv.planner.lengths import read_context

NUM_STEPS = 1500
SMALL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


def running_in_one_step(
    prompts: list[list[int]], num_blocks: int, block_size: int = 16, watermark: float = 0.0
) -> int:
    """How many of the prompts the scheduler starts when it has rows and budget for all."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=sum(map(len, prompts)),
        max_queued_requests=len(prompts),
        max_model_len=2**20,
        watermark=watermark,
        admission="watermark",
    )
    scheduler, step = Scheduler(config), StepBuffers(config)
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=1)
    assert scheduler.plan(step) is not None
    scheduler.check()
    return scheduler.stats().num_running


def promised(**options: Any) -> int:
    requests = plan(**SMALL, **options).requests
    assert requests is not None
    return requests["p50"]


def distinct_prompts(number: int, length: int, prefix: int = 0) -> list[list[int]]:
    shared = list(range(prefix))
    return [shared + [10_000 + index] * (length - prefix) for index in range(number)]


def test_block_rounding_and_the_null_block_count() -> None:
    assert promised(num_blocks=1000, context=17) == 999 // 2 == 499


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "length", "prefix", "watermark"),
    [
        (1000, 16, 17, 0, 0.0),
        (1000, 16, 16, 0, 0.0),
        (1000, 16, 300, 0, 0.0),
        (1000, 16, 300, 0, 0.05),
        (500, 7, 100, 0, 0.0),
        (500, 16, 1024 + 40, 1024, 0.0),
        (500, 16, 1024, 1024, 0.0),
        (500, 16, 1024, 1000, 0.0),
        (500, 1, 40, 20, 0.1),
        (40, 16, 16 * 38, 0, 0.2),
    ],
)
def test_scheduler_admits_exactly_the_promised_number(
    num_blocks: int, block_size: int, length: int, prefix: int, watermark: float
) -> None:
    number = promised(
        num_blocks=num_blocks,
        block_size=block_size,
        context=length,
        shared_prefix=prefix,
        watermark=watermark,
    )
    assert number > 0
    prompts = distinct_prompts(number + 1, length, min(prefix, length - 1))
    # the prefix is a whole number of shared blocks only if requests are longer than it
    if prefix < length:
        assert running_in_one_step(prompts, num_blocks, block_size, watermark) == number
    assert running_in_one_step(prompts[:number], num_blocks, block_size, watermark) == number


def test_allocator_gives_the_promised_number_and_refuses_one_more() -> None:
    number = promised(num_blocks=777, context=250)
    pool = BlockPool(777, 16)
    tables = [pool.table() for _ in range(number + 1)]
    for table in tables[:-1]:
        table.extend(-(-250 // 16))
    with pytest.raises(OutOfBlocksError):
        tables[-1].extend(-(-250 // 16))


def test_more_than_the_pool_is_promised_to_nobody() -> None:
    assert promised(num_blocks=10, context=16 * 9) == 1
    assert promised(num_blocks=10, context=16 * 9 + 1) == 0


def test_replicas_multiply_and_rows_hold_back() -> None:
    one = promised(num_blocks=1000, context=100)
    assert promised(num_blocks=1000, context=100, num_gpus=4, tensor_parallel=2) == 2 * one
    assert promised(num_blocks=1000, context=100, max_num_seqs=5) == 5


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8", "fp8"])
def test_pool_of_the_engine_has_the_promised_bytes(kv_dtype: str) -> None:
    pytest.importorskip("torch")
    from pykv import KvPool

    configs: dict[str, dict[str, Any]] = {
        "llama": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        "gpt_oss": {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "sliding_window": 4},
        "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32},
        "deepseek_v3": {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    }
    for family, config in configs.items():
        config = config | {"model_type": family}
        found = plan(config, num_blocks=9, context=5, kv_dtype=kv_dtype)
        layout = KvLayout.from_config(config)
        groups = LayerGroups.of(layout)
        pool = KvPool(layout, 9, 16, kv_dtype, groups=groups)
        assert pool.nbytes == 9 * found.rank_block_bytes, family
        assert found.engine_kv_bytes_per_token == len(groups.windows) * pool.nbytes // 9 // 16, family


def test_formula_storage_is_what_the_scheduler_holds_with_layer_groups() -> None:
    window, length, block_size = 40, 300, 16
    config = SchedulerConfig(
        num_blocks=200, groups=(window, None), max_num_seqs=1, max_num_batched_tokens=16, watermark=0.0
    )
    scheduler, step = Scheduler(config), StepBuffers(config)
    scheduler.submit(np.zeros(length - 64, np.int32), max_tokens=65)
    held = []
    while (planned := scheduler.plan(step)) is not None:
        held.append(scheduler.stats().blocks_active)
        scheduler.apply(
            planned, np.zeros(planned.num_samples, np.int64), np.zeros(planned.num_samples, np.uint8)
        )
    numbers = {**SMALL, "window": window, "num_window_layers": 1, "storage": "formula"}
    found = plan(**numbers, num_blocks=200, context=length)
    block_bytes_of_a_group = found.rank_block_bytes // 2
    promised_blocks = found.stored_kv_bytes_at[length] // block_bytes_of_a_group
    assert (
        max(held[-block_size:])
        == promised_blocks
        == -(-length // block_size) + -(-(window - 1) // block_size) + 1
    )


@pytest.mark.parametrize("config", [{"num_hidden_layers": 4}, {"num_hidden_layers": 7, "layer_types": None}])
def test_scheduler_admits_exactly_what_is_promised_for_windows(config: dict[str, Any]) -> None:
    """Prompts of a length, one after another, each until it decodes; then one more finds no room."""
    layers = config["num_hidden_layers"]
    kinds = ["sliding_attention", "full_attention"] * layers
    model = {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "head_dim": 8,
        "sliding_window": 40,
        "layer_types": kinds[:layers],
    }
    block_size, num_blocks = 64, 800
    length = 46 * block_size
    found = plan(model, num_blocks=num_blocks, block_size=block_size, context=length)
    groups = LayerGroups.of(KvLayout.from_config(model)).windows
    scheduler_config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        groups=groups,
        max_model_len=length,
        watermark=0.0,
        admission="watermark",
    )
    scheduler, step = Scheduler(scheduler_config), StepBuffers(scheduler_config)
    assert found.requests is not None
    promised = found.requests["p50"]
    for request in range(promised + 1):
        # The prompt reaches into the last block already, and 60 steps pass before the first one ends.
        prompt = np.full(length - 60, request, np.int32)
        scheduler.submit(prompt, max_tokens=60)
        for _ in range(2):
            planned = scheduler.plan(step)
            assert planned is not None
            scheduler.apply(
                planned, np.zeros(planned.num_samples, np.int64), np.zeros(planned.num_samples, np.uint8)
            )
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (min(request + 1, promised), request == promised)
        assert stats.preemptions == 0


def test_memory_gives_the_engine_as_many_blocks_as_planned() -> None:
    found = plan("bundled", memory="2GiB", utilization=1.0, context=100)
    assert found.budget is not None
    assert found.num_blocks == found.budget.kv // (16 * 23_040)


Draw = Callable[[np.random.Generator], tuple[int, int]]
"""Draws a request: tokens of its prompt, and of its output."""


@pytest.mark.parametrize("seed", [1, 2])
def test_closed_loop_at_the_mix_runs_and_at_half_more_stalls(seed: int) -> None:
    num_blocks, output = 1500, 40
    context = {"p50": 150, "p90": 600, "p99": 1500, "max": 2000}
    requests = plan(**SMALL, num_blocks=num_blocks, context=context).requests
    assert requests is not None
    number = requests["mix"]
    assert number > 40
    lengths = read_context(context, None)

    def draw(random: np.random.Generator) -> tuple[int, int]:
        return int(random.choice(lengths.tokens, p=lengths.counts / lengths.total)) - output, output

    calm = closed_loop(number, num_blocks, draw, seed)
    crowded = closed_loop(number * 3 // 2, num_blocks, draw, seed)
    assert calm.preempted_share <= calm.disturbed_share <= 0.01
    assert crowded.disturbed_share >= 0.1


@dataclass(frozen=True)
class LoopResult:
    """Shares of steps: in which somebody was preempted, and in which somebody was preempted or waited for room."""

    preempted_share: float
    disturbed_share: float


def closed_loop(users: int, num_blocks: int, draw: Draw, seed: int) -> LoopResult:
    """So many users, each of whom asks anew when his request has ended, on the real scheduler."""
    random = np.random.default_rng(seed)
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_seqs=users,
        max_num_batched_tokens=2**20,
        max_queued_requests=users,
        max_model_len=2**15,
        watermark=0.0,
        admission="watermark",
        enable_prefix_caching=False,
    )
    scheduler, step = Scheduler(config), StepBuffers(config)

    def ask() -> None:
        prompt, output = draw(random)
        scheduler.submit(np.zeros(prompt, np.int32), max_tokens=output)

    for _ in range(users):
        ask()
    preempted = disturbed = before = 0
    for _ in range(NUM_STEPS):
        planned = scheduler.plan(step)
        assert planned is not None
        stats = scheduler.stats()
        preempted += stats.preemptions > before
        disturbed += stats.preemptions > before or stats.num_waiting > 0
        before = stats.preemptions
        outcomes = np.zeros(planned.num_samples, np.uint8)
        for _ in scheduler.apply(planned, np.zeros(planned.num_samples, np.int64), outcomes):
            ask()
    scheduler.check()
    return LoopResult(preempted / NUM_STEPS, disturbed / NUM_STEPS)


@pytest.mark.parametrize("model", ["by numbers", "gpt-oss-20b"])
def test_a_replay_at_the_mix_runs_and_at_half_more_stalls(model: str, tmp_path: Path) -> None:
    """The same promise through `plan --trace` and `replay --concurrency`, with full attention and with windows."""
    random = np.random.default_rng(5)
    prompts = random.choice([100, 500, 1400], size=3000, p=[0.6, 0.35, 0.05]) + random.integers(0, 99, 3000)
    path = tmp_path / "trace.jsonl"
    rows = [{"ts": 0, "in": int(prompt), "out": 60} for prompt in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    num_blocks = 2500
    numbers = SMALL if model == "by numbers" else {"model": model}
    requests = plan(**numbers, num_blocks=num_blocks, trace=path).requests
    assert requests is not None
    options: dict[str, Any] = {"admission": "watermark", "watermark": 0.0, "max_num_seqs": 1000}
    options |= {"cost": "constant:0.01", "model": None if model == "by numbers" else model}

    def loop(users: int) -> tuple[float, float]:
        timed = replay(path, num_blocks=num_blocks - 1, concurrency=users, **options).timed
        assert timed is not None
        assert timed.refused == timed.cut == 0
        waiting = timed.series.waiting
        settled = waiting[
            len(waiting) // 4 : -len(waiting) // 4
        ]  # behind the start, before the last have come
        return timed.preempting_steps / timed.steps, float(np.mean(settled))

    number = requests["mix"]
    assert number > 30
    calm, crowded = loop(number), loop(number * 3 // 2)
    assert calm[0] <= 0.01
    assert calm[1] < 0.05 * number
    assert crowded[0] > 0.1
    assert crowded[1] > 0.15 * number, "so many wait at any moment"


TRACES = Path(__file__).parents[2] / ".." / "shared" / "traces"


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
@pytest.mark.parametrize("name", ["azure2023_conv", "azure2023_code"])
def test_closed_loop_of_a_public_trace(name: str) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    num_blocks, cap = 20_000, 16_384
    requests = plan(**SMALL, num_blocks=num_blocks, trace=path, max_model_len=cap).requests
    assert requests is not None
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]
    calm = closed_loop(requests["mix"], num_blocks, draw_from(rows), seed=1)
    crowded = closed_loop(requests["mix"] * 3 // 2, num_blocks, draw_from(rows), seed=1)
    assert calm.preempted_share <= 0.01
    assert calm.disturbed_share <= 0.05
    assert crowded.disturbed_share >= 0.5


def draw_from(rows: list[dict[str, Any]]) -> Draw:
    def draw(random: np.random.Generator) -> tuple[int, int]:
        row = rows[int(random.integers(len(rows)))]
        return row["in"], max(1, row["out"])

    return draw
