"""What a plan says of a model is what the engine that serves it says of itself, for every family that it loads."""

from __future__ import annotations

from typing import Any

import pytest

from pykv import Engine, EngineConfig, KvPlan, plan

KV_MEMORY_BYTES = 2**20 + 12_345


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_the_engine_counts_what_was_planned(
    admitted_family: str, kv_dtype: str, make_model: Any, tiny_tokenizer: Any
) -> None:
    compare(make_model(admitted_family), tiny_tokenizer, kv_dtype)


def test_a_group_that_is_not_full_is_counted_whole(make_model: Any, tiny_tokenizer: Any) -> None:
    """Ten layers with a window and eleven without are two groups of eleven."""
    kinds = ["full_attention", "sliding_attention"] * 10 + ["full_attention"]
    model = make_model("gpt_oss", num_hidden_layers=21, layer_types=kinds)
    found = compare(model, tiny_tokenizer, "f32")
    assert found.engine_kv_bytes_per_token == found.kv_bytes_per_token * 22 // 21


def compare(model: Any, tokenizer: Any, kv_dtype: str) -> KvPlan:
    weights = 1  # a byte: what the engine is given is for the cache alone
    found = plan(
        model.config,
        memory=KV_MEMORY_BYTES + weights,
        weights_bytes=weights,
        utilization=1.0,
        kv_dtype=kv_dtype,
        context=64,
    )
    options = EngineConfig(
        kv_memory_bytes=KV_MEMORY_BYTES, kv_dtype=kv_dtype, device="cpu", max_model_len=128
    )
    with Engine(model, tokenizer, config=options) as engine:
        stats = engine.stats()
    assert stats.blocks_total + 1 == found.num_blocks
    assert stats.kv_bytes_per_token == found.engine_kv_bytes_per_token
    return found
