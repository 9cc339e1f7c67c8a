"""Bytes a token and a request, against the textbook, published sizes and the layouts of known models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pykv import KvLayout
from pykv.planner import plan
from pykv.planner.tables import known_model, model_names

FACTS_PATH = Path(__file__).parents[2] / ".." / "shared" / "kv_facts.json"
needs_facts = pytest.mark.skipif(not FACTS_PATH.is_file(), reason="../shared/kv_facts.json is not there")
TEXTBOOK = {"num_layers": 80, "num_kv_heads": 8, "head_dim": 128, "num_heads": 64, "weights_bytes": "140GB"}


def load_facts() -> list[dict[str, Any]]:
    return json.loads(FACTS_PATH.read_text())["models"] if FACTS_PATH.is_file() else []


def test_textbook_case_to_the_byte() -> None:
    found = plan(**TEXTBOOK, context=8000, users=100, num_blocks=1000)
    assert found.kv_bytes_per_token == 327_680 == 320 * 2**10
    assert plan(**TEXTBOOK | {"num_kv_heads": 64}).kv_bytes_per_token == 8 * 327_680
    assert found.kv_bytes_at[8000] == found.stored_kv_bytes_at[8000] == 500 * 16 * 327_680 == 2_621_440_000
    assert found.users is not None
    assert found.users.kv_bytes == 262_144_000_000
    assert found.users.weights_passed_at == 54
    assert found.kv_to_weights == pytest.approx(1.87245, abs=1e-5)
    assert found.requests is not None
    assert found.requests["p50"] == 999 // 500


def test_textbook_case_needs_no_memory() -> None:
    found = plan(**TEXTBOOK, context=8000, users=100)
    assert (found.num_blocks, found.requests, found.limit) == (None, None, None)
    assert found.kv_to_weights == pytest.approx(1.87245, abs=1e-5)
    gqa = next(lever for lever in found.levers if lever.lever == "gqa")
    assert (gqa.kind, gqa.factor) == ("in use", 8.0)


@needs_facts
@pytest.mark.parametrize("fact", load_facts(), ids=lambda fact: fact["model"])
def test_shipped_model_has_the_published_sizes(fact: dict[str, Any]) -> None:
    found = plan(fact["model"])
    assert found.kv_bytes_per_token == fact["bytes_per_token_bf16"]
    eight_bit = plan(fact["model"], kv_dtype="fp8")
    assert eight_bit.kv_bytes_per_token == fact["bytes_per_token_fp8"]
    windows = {group.window for group in found.groups} - {None}
    if windows == (
        {fact["sliding_window"]} - {None}
    ):  # two configs name another window than the facts' source
        for num_tokens, num_bytes in fact["kv_bytes_at"].items():
            assert found.kv_bytes_at[int(num_tokens)] == num_bytes


@needs_facts
def test_every_model_of_the_facts_is_shipped() -> None:
    facts = load_facts()
    assert len(facts) >= 36
    assert {fact["model"] for fact in facts} <= set(model_names())


@pytest.mark.parametrize("name", model_names())
def test_shipped_model_plans_with_its_own_cap(name: str) -> None:
    found = plan(name)
    assert found.context_cap is not None
    assert found.kv_bytes_at[found.context_cap] > 0
    assert found.weights_bytes is not None
    assert known_model(name)[1]["source"].endswith(name)


def test_windows_bend_the_curve_and_the_pool_holds_blocks_of_them() -> None:
    found = plan("gpt-oss-120b", context=8192)
    assert found.kv_bytes_per_token == found.kv_bytes_at[1] == 73_728
    assert found.kv_bytes_at[8192] == 306_708_480
    assert found.stored_kv_bytes_at[8192] == (512 + 9) * 16 * 36_864
    assert found.storage == "engine"
    slope = found.kv_bytes_at[2048] - found.kv_bytes_at[1024]
    assert slope == 1024 * 36_864


def test_formula_storage_keeps_a_window_and_the_block_that_it_touches() -> None:
    found = plan("gpt-oss-120b", context=8192, storage="formula")
    window_blocks = 128 // 16 + 1
    assert found.stored_kv_bytes_at[8192] == (512 + window_blocks) * 16 * 36_864


@pytest.mark.parametrize(
    ("dtype", "scales", "kv_bytes", "scale_bytes"),
    [
        ("bfloat16", None, 23_040, 0),
        ("int8", "token_head", 11_520, 720),
        ("fp8", "token_head", 11_520, 720),
        ("fp8", "tensor", 11_520, 0),
        ("float32", None, 46_080, 0),
    ],
)
def test_scales_are_counted_apart(dtype: str, scales: str | None, kv_bytes: int, scale_bytes: int) -> None:
    found = plan("bundled", kv_dtype=dtype, kv_scales=scales)
    assert (found.kv_bytes_per_token, found.kv_scale_bytes_per_token) == (kv_bytes, scale_bytes)
    assert found.engine_kv_bytes_per_token == kv_bytes + scale_bytes
    assert found.rank_block_bytes == 16 * (kv_bytes + scale_bytes)


def test_latent_attention_is_promised_as_the_pool_stores_it() -> None:
    found = plan("deepseek-v3", context=1000, num_blocks=1000)
    assert found.kv_bytes_per_token == 70_272
    assert found.engine_kv_bytes_per_token == 4_997_120
    assert found.rank_block_bytes == 16 * 4_997_120
    assert found.groups[0].kind == "latent"
    by_formula = plan("deepseek-v3", context=1000, num_blocks=1000, storage="formula")
    assert by_formula.rank_block_bytes == 16 * 70_272


def test_latent_by_numbers() -> None:
    assert plan(num_layers=61, latent_dim=576).kv_bytes_per_token == 70_272


def test_layers_that_share_keys_store_none() -> None:
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    }
    found = plan(config)
    assert (
        found.kv_bytes_per_token
        == 2 * 2 * 2 * 16 * 2
        == KvLayout.from_config(config).bytes_per_token("bfloat16")
    )
    assert {group.kind: group.num_layers for group in found.groups if group.kind == "shared"} == {"shared": 1}
    assert sum(group.num_layers for group in found.groups) == 4


def test_units_are_exact() -> None:
    gib = plan("llama-3.1-8b", memory="80GiB").budget
    gb = plan("llama-3.1-8b", memory="80GB").budget
    assert gib is not None
    assert gb is not None
    assert (gib.total, gb.total) == (85_899_345_920, 80_000_000_000)
