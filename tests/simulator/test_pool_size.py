"""The blocks of a pool that is given in bytes: by the model that the cost names, scales counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pykv
from pykv.simulator.pool_size import blocks_in

AGENTS = Path(__file__).parents[2] / "examples/traces/agents.jsonl"
LLAMA = 131_072


@pytest.mark.parametrize(
    ("cost", "bytes_per_token"),
    [
        (None, LLAMA),
        ("roofline:H100,model=llama-3.1-8b", LLAMA),
        ("roofline:H100,model=llama-3.1-70b", 327_680),
        ("roofline:H100,parameters=3e10,kv_bytes=98304", 98_304),
    ],
)
def test_a_token_takes_what_the_costs_model_says(cost: str | None, bytes_per_token: int) -> None:
    assert blocks_in(100 * 16 * bytes_per_token, 16, cost=cost) == 100
    assert blocks_in(100 * 16 * bytes_per_token - 1, 16, cost=cost) == 99


def test_a_replay_counts_by_the_model_of_its_cost() -> None:
    found = pykv.replay(
        AGENTS,
        kv_memory_bytes=64 * 327_680 * 3000,
        cost="roofline:H100,model=llama-3.1-70b",
    )
    assert found.num_blocks == 3000


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("given", [None, LLAMA])
def test_scales_of_eight_bits_are_counted(dtype: str, given: int | None) -> None:
    with_scales = LLAMA // 2 + 32 * 8 * 2 * 4  # a float32 for each layer, head, key and value
    pool = 16 * with_scales * 100
    assert blocks_in(pool, 16, cost=None, dtype=dtype, bytes_per_token=given) == 100
    assert blocks_in(pool - 1, 16, cost=None, dtype=dtype, bytes_per_token=given) == 99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "constant:1"}, "kv_bytes_per_token is None: .* 'constant:1' names none"),
        ({"cost": "roofline:H100"}, "kv_bytes_per_token is None"),
        ({"cost": pykv.CostModel(fixed=1.0)}, "kv_bytes_per_token is None"),
        ({"cost": "roofline:H100,kv_bytes=nan"}, "kv_bytes_per_token is nan"),
        ({"bytes_per_token": 0}, "kv_bytes_per_token is 0: allowed is above 0"),
        ({"dtype": "int3"}, "kv_dtype is 'int3'"),
        ({"memory_bytes": -1}, "kv_memory_bytes is -1"),
        ({"memory_bytes": 1000}, "kv_memory_bytes is 1000: allowed is at least a block, which takes 2097152"),
    ],
)
def test_what_is_not_allowed_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pykv.ConfigError, match=message):
        blocks_in(**{"memory_bytes": 10**9, "block_size": 16, "cost": None, **options})
