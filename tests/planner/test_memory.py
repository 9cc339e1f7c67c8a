"""What is left for the KV cache: other processes' memory is not ours, and the smallest rank decides."""

from __future__ import annotations

import pytest

from pykv import ConfigError
from pykv.planner import plan
from pykv.planner.memory import GpuMemory, kv_budget

GB = 10**9


def test_what_others_hold_is_not_charged_to_this_engine() -> None:
    found = kv_budget([GpuMemory(80 * GB, 30 * GB)], weights_bytes=10 * GB, utilization=0.5)
    assert found.kv == 30 * GB


def test_share_is_capped_by_what_is_free() -> None:
    found = kv_budget([GpuMemory(80 * GB, 30 * GB)], weights_bytes=10 * GB, utilization=0.7)
    assert (found.usable, found.kv) == (50 * GB, 40 * GB)


def test_smallest_rank_decides() -> None:
    ranks = [GpuMemory(80 * GB), GpuMemory(80 * GB, 40 * GB)]
    assert kv_budget(ranks, weights_bytes=10 * GB, utilization=1.0).kv == 30 * GB
    found = plan("llama-3.1-8b", memory=["80GB", "40GB"], num_gpus=2, utilization=1.0)
    assert found.budget is not None
    assert found.budget.usable == 40 * GB


@pytest.mark.parametrize(("in_use", "weights"), [(0, 80), (70, 10), (80, 1)])
def test_nothing_left_is_an_error_with_the_figures(in_use: int, weights: int) -> None:
    with pytest.raises(ConfigError, match=r"nothing is left for the KV cache.*weights.*in use"):
        kv_budget([GpuMemory(80 * GB, in_use * GB)], weights_bytes=weights * GB)


def test_more_in_use_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in_use is 81000000000: allowed is a size from 0"):
        kv_budget([GpuMemory(80 * GB, 81 * GB)], weights_bytes=1)
    with pytest.raises(ConfigError, match="gpus is"):
        kv_budget([], weights_bytes=1)


def test_weights_are_parted_over_ranks_and_the_rest_is_blocks() -> None:
    found = plan("llama-3.1-70b", gpu="H100", num_gpus=4, reserve="2GiB", context=8000)
    budget = found.budget
    assert budget is not None
    assert budget.total == 81_559 * 2**20
    assert budget.weights == -(-found.weights_bytes // 4) if found.weights_bytes else 0
    assert budget.kv == int(budget.total * 0.9) - budget.weights - 2 * 2**30
    assert found.rank_block_bytes == 16 * 327_680 // 4
    assert found.num_blocks == budget.kv // found.rank_block_bytes


def test_too_large_a_model_names_what_would_help() -> None:
    with pytest.raises(
        ConfigError, match=r"141 GB.*allowed is at least 2 times as many GPUs in tensor_parallel, larger"
    ):
        plan("llama-3.1-70b", gpu="H100")
