"""What one rank holds: heads shared out, then replicated; a latent whole; ranks that do not divide refused."""

from __future__ import annotations

from typing import Any

import pytest

from pykv import ConfigError
from pykv.planner import plan

LLAMA: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128, "num_heads": 64}
WHOLE = 16 * 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(("ranks", "part"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (64, 8)])
def test_more_ranks_than_kv_heads_replicate(ranks: int, part: int) -> None:
    found = plan(**LLAMA, tensor_parallel=ranks)
    assert found.rank_block_bytes == WHOLE // part
    assert found.kv_bytes_per_token * 16 == WHOLE


@pytest.mark.parametrize("ranks", [3, 5, 7, 12, 128])
def test_ranks_that_do_not_divide_are_refused(ranks: int) -> None:
    with pytest.raises(
        ConfigError, match=f"tensor_parallel is {ranks}: allowed is a divisor of the model's 64 query"
    ):
        plan(**LLAMA, tensor_parallel=ranks)


def test_kv_heads_that_do_not_divide_are_refused() -> None:
    numbers = {**LLAMA, "num_kv_heads": 6, "num_heads": 12}
    with pytest.raises(ConfigError, match="tensor_parallel is 4: allowed is a divisor of the 6 KV heads"):
        plan(**numbers, tensor_parallel=4)
    assert plan(**numbers, tensor_parallel=12).rank_block_bytes == 16 * 4 * 2 * 128 * 2


def test_one_kv_head_is_held_by_every_rank() -> None:
    alone = plan("falcon-7b").rank_block_bytes
    assert plan("falcon-7b", tensor_parallel=71).rank_block_bytes == alone


def test_latent_is_held_whole_by_every_rank() -> None:
    by_formula = {ranks: plan("deepseek-v3", tensor_parallel=ranks, storage="formula") for ranks in (1, 8)}
    assert by_formula[1].rank_block_bytes == by_formula[8].rank_block_bytes == 16 * 70_272
    stored = plan("deepseek-v3", tensor_parallel=8)
    assert stored.rank_block_bytes == 16 * 4_997_120 // 8


def test_gpus_are_a_multiple_of_the_ranks() -> None:
    found = plan(**LLAMA, num_gpus=8, tensor_parallel=2)
    assert (found.num_replicas, found.tensor_parallel) == (4, 2)
    assert plan(**LLAMA, num_gpus=4).tensor_parallel == 4
    with pytest.raises(
        ConfigError, match="tensor_parallel is 4: allowed is a divisor of num_gpus, which is 6"
    ):
        plan(**LLAMA, num_gpus=6, tensor_parallel=4)
