"""All GPUs compared: each row is a plan of its own, the fewest GPUs come first."""

from __future__ import annotations

from typing import Any

import pytest

from pykv import ConfigError
from pykv.planner import GpuChoice, compare_gpus, plan

CHAT: dict[str, Any] = {"context": "p50=900,p90=3000,p99=9000,max=16384", "users": 2000}


@pytest.fixture(scope="module")
def choices() -> tuple[GpuChoice, ...]:
    return compare_gpus("llama-3.1-8b", **CHAT)


def test_rows_are_plans(choices: tuple[GpuChoice, ...]) -> None:
    assert len(choices) > 20
    for choice in choices[::9]:
        found = plan("llama-3.1-8b", gpu=choice.gpu, num_gpus=choice.tensor_parallel, **CHAT)
        assert found.requests is not None
        assert found.users is not None
        assert (found.requests["mix"], found.users.gpus_needed) == (choice.requests, choice.gpus_needed)
        assert found.read_seconds == pytest.approx(choice.read_seconds)
    needed = [choice.gpus_needed or 0 for choice in choices]
    assert needed == sorted(needed)


def test_no_other_ranks_need_fewer_gpus(choices: tuple[GpuChoice, ...]) -> None:
    choice = next(choice for choice in choices if choice.gpu == "L4-24GB")
    assert choice.gpus_needed is not None
    for ranks in (1, 2, 4, 8):
        users = plan("llama-3.1-8b", gpu="L4", num_gpus=ranks, **CHAT).users
        assert users is not None
        assert users.gpus_needed is not None
        assert users.gpus_needed >= choice.gpus_needed


def test_gpus_that_are_too_small_are_left_out() -> None:
    names = [choice.gpu for choice in compare_gpus("deepseek-v3", context=8000)]
    assert "B200-180GB" in names
    assert "L4-24GB" not in names


def test_what_a_comparison_refuses() -> None:
    with pytest.raises(ConfigError, match="gpu is given, but a comparison tries all"):
        compare_gpus("qwen3-8b", gpu="H100")
    with pytest.raises(ConfigError, match="nothing is left for the KV cache"):
        compare_gpus("qwen3-8b", weights_bytes="90TB")
    with pytest.raises(ConfigError, match="not one request fits"):
        compare_gpus("deepseek-v3", context=10**8, max_model_len=10**8)
