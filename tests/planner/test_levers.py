"""What would move the number, what holds it back, and what so many users hold."""

from __future__ import annotations

from typing import Any

import pytest

from pykv.planner import KvPlan, plan
from pykv.planner.levers import Lever

CHAT = "p50=600,p90=2500,p99=7000,max=8192"


def lever(found: KvPlan, name: str) -> Lever:
    (one,) = (lever for lever in found.levers if lever.lever == name)
    return one


def mix(found: KvPlan) -> int:
    assert found.requests is not None
    return found.requests["mix"]


def test_levers_are_sorted_and_named() -> None:
    found = plan("llama-3.1-8b", gpu="L4", context=CHAT)
    names = [lever.lever for lever in found.levers]
    assert {"gqa", "kv_dtype", "cap", "window", "tensor_parallel", "prefix_sharing", "weights_dtype"} == set(
        names
    )
    free = [lever.factor for lever in found.levers if lever.kind != "in use"]
    assert free == sorted(free, reverse=True)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("kv_dtype", {"kv_dtype": "fp8", "kv_scales": "tensor"}),
        ("cap", {"max_model_len": 2500}),
        ("prefix_sharing", {"shared_prefix": 300}),
        ("tensor_parallel", {"num_gpus": 2}),
    ],
)
def test_lever_says_what_the_changed_plan_says(name: str, changed: dict[str, Any]) -> None:
    options: dict[str, Any] = {"gpu": "L4", "context": CHAT}
    found = lever(plan("llama-3.1-8b", **options), name)
    assert found.requests == mix(plan("llama-3.1-8b", **options | changed))


@pytest.mark.parametrize(
    ("context", "cap"),
    [(CHAT, 2500), ("p50=600,p90=2500,max=2500", 600), ("2000", 1000), ("p50=99,p90=99,max=99", 49)],
)
def test_cap_is_tried_below_the_longest(context: str, cap: int) -> None:
    assert f"{cap:,} tokens" in lever(plan("llama-3.1-8b", gpu="L4", context=context), "cap").change


def test_gqa_figures_in_both_directions() -> None:
    in_use = lever(plan("llama-3.1-8b", gpu="H100", context=2000), "gqa")
    assert (in_use.kind, in_use.factor) == ("in use", pytest.approx(4, abs=0.01))
    possible = lever(plan("llama-2-7b-hf", gpu="H100", context=2000), "gqa")
    assert (possible.kind, possible.factor) == ("model", pytest.approx(8, abs=0.01))


def test_more_gpus_are_compared_by_the_gpu() -> None:
    found = lever(plan("qwen3-0.6b", gpu="H100", context=2000), "tensor_parallel")
    assert found.kind == "hardware"
    assert 1.0 < found.factor < 1.05  # nearly no weights to be parted


def test_windows_that_give_back_are_in_use() -> None:
    window = lever(plan("gpt-oss-20b", gpu="L40S", context=8000), "window")
    assert (window.kind, window.factor) == ("in use", pytest.approx(1.97, abs=0.02))


def test_what_the_engine_does_not_do_yet_is_a_lever_of_the_engine() -> None:
    storage = lever(plan("deepseek-v3", gpu="B200", num_gpus=8, context=8000), "storage")
    assert storage.kind == "engine"
    assert storage.factor > 8  # 71 times less, but whole on each of 8 ranks


def test_shared_prefix_counts_once() -> None:
    found = plan("llama-3.1-8b", gpu="L4", context=2000, shared_prefix=1600)
    assert found.requests_with is not None
    assert found.requests_with["shared_prefix"]["p50"] == found.requests["p50"] if found.requests else False
    usable = (found.num_blocks or 0) - 1
    assert found.requests_with["no_shared_prefix"]["p50"] == usable // 125
    assert found.requests_with["shared_prefix"]["p50"] == (usable - 100) // 25
    assert lever(found, "prefix_sharing").kind == "in use"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"gpu": "L4", "context": 1000}, "weights"),
        ({"gpu": "H100", "context": 1000}, "kv_memory"),
        ({"gpu": "H100", "context": 1000, "max_num_seqs": 10}, "max_num_seqs"),
        ({"gpu": "L4", "context": 130_000}, "longest_request"),
    ],
)
def test_limit_is_named(options: dict[str, Any], what: str) -> None:
    limit = plan("llama-3.1-8b", **options).limit
    assert limit is not None
    assert limit.what == what


def test_users_need_whole_copies() -> None:
    one = plan("llama-3.1-8b", gpu="L4", context=CHAT)
    assert one.users is not None
    assert (one.users.users, one.users.gpus_needed) == (mix(one), 1)
    many = plan("llama-3.1-8b", gpu="L4", context=CHAT, users=10 * mix(one) + 1)
    assert many.users is not None
    assert many.users.gpus_needed == 11


def test_without_lengths_every_request_is_as_long_as_the_cap() -> None:
    found = plan("llama-3.1-8b", gpu="H100", max_model_len=4096)
    assert found.lengths_source == "4,096 tokens each, the cap"
    assert found.requests is not None
    assert found.requests["p50"] == found.requests["cap"] == found.requests["mix"]


def test_requests_beyond_the_cap_are_counted_and_said() -> None:
    found = plan("llama-3.1-8b", gpu="H100", context=CHAT, max_model_len=2500)
    assert found.share_beyond_cap == pytest.approx(0.1, abs=0.001)
    assert found.lengths is not None
    assert found.lengths["max"] == 2500


def test_full_pool_is_read_once_a_step() -> None:
    found = plan("llama-3.1-8b", gpu="L4", context=1000)
    assert found.read_seconds == pytest.approx(21.7e9 / 300e9, rel=0.01)


def test_smaller_weights_are_worth_what_a_plan_with_them_says() -> None:
    options = {"gpu": "L4", "context": 2000}
    found = lever(plan("llama-3.1-8b", **options), "weights_dtype")
    smaller = plan("llama-3.1-8b", weights_dtype="fp8", **options)
    assert smaller.requests is not None
    assert found.requests == smaller.requests["mix"]
