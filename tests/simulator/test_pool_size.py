"""The blocks of a pool that is given in bytes: as many as a plan finds for the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pykv
from pykv.kv_format import kv_format_of
from pykv.planner.tables import model_names
from pykv.simulator.pool_size import blocks_in
from pykv.simulator.served_model import served_model

AGENTS = Path(__file__).parents[2] / "examples/traces/agents.jsonl"
LLAMA = 131_072


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_block_takes_the_bytes_that_a_plan_says(name: str, kv_dtype: str) -> None:
    found = pykv.plan(name, num_blocks=100, kv_dtype=kv_dtype, context=1000)
    if found.engine_kv_bytes_per_token is None:
        with pytest.raises(pykv.ConfigError, match="which a replay cannot represent") as refused:
            served_model(name)
        assert found.engine_refusal in str(refused.value)
    else:
        assert served_model(name).block_bytes(16, kv_format_of(kv_dtype)) == found.rank_block_bytes


@pytest.mark.parametrize(
    ("options", "bytes_per_token"),
    [
        ({}, LLAMA),
        ({"model": "llama-3.1-70b"}, 327_680),
        ({"cost": "roofline:H100,model=llama-3.1-70b"}, 327_680),
        ({"cost": "roofline:H100", "model": "llama-3.1-70b"}, 327_680),
        ({"cost": "constant:1", "model": "llama-3.1-70b"}, 327_680),
        ({"serial": True, "model": "llama-3.1-70b"}, 327_680),
        ({"cost": "roofline:H100,parameters=3e10,kv_bytes=98304"}, 98_304),
        ({"cost": "constant:1", "kv_bytes_per_token": 98_304}, 98_304),
        ({"serial": True, "kv_bytes_per_token": 98_304}, 98_304),
    ],
)
def test_a_replay_counts_by_the_model_that_is_named(options: dict[str, Any], bytes_per_token: int) -> None:
    for pool, blocks in ((64 * bytes_per_token * 3000, 3000), (64 * bytes_per_token * 3000 - 1, 2999)):
        assert pykv.replay(AGENTS, kv_memory_bytes=pool, **options).num_blocks == blocks


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("stored", [LLAMA, "llama-3.1-8b"])
def test_scales_of_eight_bits_are_counted(dtype: str, stored: float | str) -> None:
    with_scales = LLAMA // 2 + 32 * 8 * 2 * 4  # a float32 for each layer, head, key and value
    pool, of = 16 * with_scales * 100, served_model(stored) if isinstance(stored, str) else stored
    assert blocks_in(pool, 16, stored=of, kv_format=kv_format_of(dtype)) == 100
    assert blocks_in(pool - 1, 16, stored=of, kv_format=kv_format_of(dtype)) == 99


def test_blocks_of_layers_with_windows_are_of_one_group_and_given_back() -> None:
    gemma, pool = {"cost": "roofline:H100,model=gemma-3-27b-it"}, 8 * 10**9
    found = pykv.replay(AGENTS, kv_memory_bytes=pool, **gemma)
    planned = pykv.plan("gemma-3-27b-it", memory=pool + 1, weights_bytes=1, utilization=1.0, block_size=64)
    assert found.num_blocks == planned.num_blocks
    assert found.to_json()["hit_rate_opt"] is None
    assert found.timed is not None
    # As one group of full attention the same requests need more than twice the memory.
    assert planned.stored_kv_bytes_at[131_072] * 2 < 131_072 * planned.engine_kv_bytes_per_token
    assert found.timed.refused == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cost": "constant:1"},
            "kv_bytes_per_token is None: allowed with kv_memory_bytes where a model is named",
        ),
        ({"cost": pykv.CostModel(fixed=1.0)}, "kv_bytes_per_token is None"),
        ({"serial": True}, "kv_bytes_per_token is None"),
        (
            {"cost": "constant:1", "kv_bytes_per_token": 0},
            "kv_bytes_per_token is 0: allowed is a number above 0",
        ),
        (
            {"kv_bytes_per_token": 5},
            "kv_bytes_per_token is 5: not allowed where meta-llama/Meta-Llama-3.1-8B",
        ),
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3'"),
        (
            {"kv_dtype": "fp8", "cost": "constant:1", "model": "qwen3-8b"},
            "kv_dtype is 'fp8': not allowed with cost",
        ),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes is -1: allowed is a size above 0 with its unit"),
        ({"kv_memory_bytes": "8 apples"}, "kv_memory_bytes is '8 apples': allowed is a size"),
        ({"kv_memory_bytes": 1.5}, "kv_memory_bytes is 1.5: allowed is a size"),
        (
            {"kv_memory_bytes": 1000},
            "kv_memory_bytes is 1000: allowed is at least a block, which takes 8388608",
        ),
        (
            {"model": "deepseek-v2", "cost": "roofline:H100,model=qwen3-8b"},
            "model is 'deepseek-v2', and cost names",
        ),
        ({"model": "qwen3-next-80b-a3b-instruct"}, "a replay cannot represent"),
        ({"model": "gemma-3-27b-it", "serial": True}, "need virtual time, not serial"),
        ({"model": 5}, "model is 5: allowed is a folder"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pykv.ConfigError, match=message):
        pykv.replay(AGENTS, **{"kv_memory_bytes": 10**9, **options})


def test_a_size_is_bytes_or_a_text_with_its_unit() -> None:
    pools = [pykv.replay(AGENTS, kv_memory_bytes=size).num_blocks for size in (2**30, "1GiB", "1GB")]
    assert pools[0] == pools[1] > pools[2] > 0


def test_the_dtype_of_the_cache_changes_the_steps_of_a_replay_too() -> None:
    seconds = {}
    for kv_dtype in ("bf16", "fp8"):
        timed = pykv.replay(AGENTS, num_blocks=2000, kv_dtype=kv_dtype).timed
        assert timed is not None
        seconds[kv_dtype] = timed.tpot.mean
    assert seconds["fp8"] < seconds["bf16"]
