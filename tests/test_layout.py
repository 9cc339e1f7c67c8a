"""The one formula, against published sizes and against the field names of many families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykv import ConfigError, KvLayout, UnsupportedModelError
from pykv.kv_format import kv_format_of
from pykv.layout import KvLayer

FACTS_PATH = Path(__file__).parents[1] / ".." / "shared" / "kv_facts.json"

needs_facts = pytest.mark.skipif(not FACTS_PATH.is_file(), reason="../shared/kv_facts.json is not there")

LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}

# Families whose config.json leaves out which layers have the window.
FAMILIES = {"google/gemma-2": "gemma2", "google/gemma-3": "gemma3_text", "openai/gpt-oss": "gpt_oss"}


def load_facts() -> list[dict[str, Any]]:
    return json.loads(FACTS_PATH.read_text())["models"] if FACTS_PATH.is_file() else []


def config_of(fact: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model, as far as the formula reads it."""
    config = {
        "num_hidden_layers": fact["num_layers"],
        "num_attention_heads": fact["num_attention_heads"],
        "num_key_value_heads": fact["num_kv_heads"],
        "head_dim": fact["head_dim"],
        "sliding_window": fact["sliding_window"],
    }
    family = next((family for prefix, family in FAMILIES.items() if fact["model"].startswith(prefix)), None)
    if fact["attention"] == "mla":
        config |= {name: fact[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
    return config | ({"model_type": family} if family else {})


@needs_facts
@pytest.mark.parametrize("fact", load_facts(), ids=lambda fact: fact["model"])
def test_size_is_the_published_one(fact: dict[str, Any]) -> None:
    layout = KvLayout.from_config(config_of(fact), storage="latent")
    assert layout.num_layers == fact["num_layers"]
    assert layout.bytes_per_token("bfloat16") == fact["bytes_per_token_bf16"]
    assert layout.growing_bytes_per_token("bfloat16") == fact["growing_bytes_per_token_bf16"]
    assert layout.window_bytes("bfloat16") == fact["window_cap_bytes_per_seq_bf16"]
    assert layout.block_bytes(16, "bfloat16") == fact["block16_bytes_bf16"]
    for num_tokens, num_bytes in fact["kv_bytes_at"].items():
        assert layout.capped_bytes(int(num_tokens), "bfloat16") == num_bytes


@needs_facts
def test_facts_were_found() -> None:
    assert len(load_facts()) >= 36


def test_explicit_head_dim_is_used_not_hidden_size_over_heads() -> None:
    qwen3_4b = {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
    }
    assert KvLayout.from_config(qwen3_4b).bytes_per_token("bfloat16") == 147_456


def test_llama_3_8b_without_head_dim() -> None:
    llama_3_8b = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    assert KvLayout.from_config(llama_3_8b).bytes_per_token("bfloat16") == 131_072


def test_no_kv_heads_means_as_many_as_heads() -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}
    assert KvLayout.from_config(config).layers == (KvLayer(4, 8, 8),)


@pytest.mark.parametrize(
    ("config", "num_kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "num_kv_heads": 4}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False, "num_kv_heads": 2}, 2),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"attn_config": {"kv_n_heads": 2}}, 2),
        ({"num_key_value_heads": None}, 4),
    ],
)
def test_kv_heads_of_families(config: dict[str, Any], num_kv_heads: int) -> None:
    base = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}
    assert KvLayout.from_config(base | config).layers == (KvLayer(num_kv_heads, 8, 8),)


@pytest.mark.parametrize(
    "config",
    [
        {"n_layer": 3, "n_head": 4, "n_embd": 32},  # gpt-2
        {"n_layer": 3, "n_head": 4, "hidden_size": 32},  # bloom
        {"n_layers": 3, "n_heads": 4, "d_model": 32},  # mpt
        {"num_layers": 3, "num_heads": 4, "hidden_size": 32},  # gpt-neo
        {"num_layers": 3, "num_attention_heads": 4, "kv_channels": 8, "hidden_size": 99},  # chatglm
        {"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}},
    ],
)
def test_old_field_names(config: dict[str, Any]) -> None:
    assert KvLayout.from_config(config).layers == (KvLayer(4, 8, 8),) * 3


def test_heads_listed_layer_by_layer() -> None:
    config = {
        "num_transformer_layers": 2,
        "head_dim": 8,
        "num_query_heads": [4, 8],
        "num_kv_heads": [1, 2],
    }
    assert KvLayout.from_config(config).layers == (KvLayer(1, 8, 8), KvLayer(2, 8, 8))


def test_gpt_oss_capped_and_uniform() -> None:
    gpt_oss = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    }
    layout = KvLayout.from_config(gpt_oss)
    assert layout.bytes_per_token("bfloat16") == 73_728
    assert layout.capped_bytes(1, "bfloat16") == 73_728
    assert layout.capped_bytes(8192, "bfloat16") == 306_708_480
    assert layout.uniform_bytes(8192, "bfloat16") == 603_979_776


def test_latent_attention_stored_both_ways() -> None:
    deepseek_v3 = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "hidden_size": 7168,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    assert KvLayout.from_config(deepseek_v3, storage="latent").bytes_per_token("bfloat16") == 70_272
    assert KvLayout.from_config(deepseek_v3).bytes_per_token("bfloat16") == 4_997_120
    assert KvLayout.from_config(deepseek_v3).layers[0] == KvLayer(128, 192, 128)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 8}, [8, 8, 8, 8]),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ({"sliding_window": 8, "sliding_window_pattern": "LLG"}, [8, 8, None, 8]),
        ({"sliding_window": 8, "model_type": "cohere2"}, [8, 8, 8, None]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 8] * 2),
        ({"window_size": 8, "attention_layers": ["global", "local"] * 2}, [None, 8] * 2),
    ],
)
def test_windows_of_layers(config: dict[str, Any], windows: list[int | None]) -> None:
    layout = KvLayout.from_config(LLAMA | {"num_hidden_layers": 4} | config)
    assert [layer.window for layer in layout.layers] == windows


def test_layers_that_share_kv_cost_nothing() -> None:
    config = LLAMA | {
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
    }
    layout = KvLayout.from_config(config)
    assert [layer.reads_layer for layer in layout.layers] == [None, None, None, 1, 1, 2]
    assert [layer.window for layer in layout.layers] == [8, 8, None] * 2
    assert layout.elements_per_token == 3 * layout.layers[0].elements_per_token


def test_single_layers_with_other_heads() -> None:
    config = LLAMA | {"per_layer_config": {"01": {"head_dim": 16, "num_key_value_heads": 1}}}
    assert KvLayout.from_config(config).layers == (KvLayer(2, 8, 8), KvLayer(1, 16, 16))


def test_layers_without_window_with_a_head_size_of_their_own() -> None:
    config = LLAMA | {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert KvLayout.from_config(config).layers == (KvLayer(2, 8, 8, 4), KvLayer(2, 16, 16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer 1 is 'linear_attention'"),
        ({"layers_block_type": ["mamba", "attention"]}, "layer 0 is 'mamba'"),
        ({"layer_types": ["full_attention"]}, "1 are listed for 2 layers"),
        ({"num_hidden_layers": None}, "none of the fields num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not given"),
    ],
)
def test_config_that_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        KvLayout.from_config(LLAMA | config)


def test_unknown_storage_and_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="storage is 'packed'"):
        KvLayout.from_config(LLAMA, storage="packed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype is 'float31'"):
        KvLayout.from_config(LLAMA).bytes_per_token("float31")


def test_dtype_may_be_an_object() -> None:
    torch = pytest.importorskip("torch")
    layout = KvLayout.from_config(LLAMA)
    assert layout.bytes_per_token(torch.float32) == 2 * layout.bytes_per_token("bfloat16")


def test_layout_needs_no_torch() -> None:
    code = f"import sys, pykv; pykv.KvLayout.from_config({LLAMA!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "phi3",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "falcon",
        "bloom",
        "mpt",
        "opt",
        "gpt_oss",
        "cohere2",
        "exaone4",
        "olmo3",
        "mixtral",
        "deepseek_v3",
        "starcoder2",
    ],
)
def test_config_object_and_its_json_agree(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    as_json = json.loads(json.dumps(config.to_dict()))
    layout = KvLayout.from_config(config)
    assert KvLayout.from_config(as_json) == layout
    as_json.pop("layer_types", None)  # what older files leave out
    assert KvLayout.from_config(as_json) == layout


def test_eight_bits_count_their_scales() -> None:
    bundled = KvLayout((KvLayer(3, 64, 64),) * 30)
    assert bundled.bytes_per_token("bf16") == 23_040
    for name in ("int8", "fp8"):
        assert bundled.bytes_per_token(name) == 2 * 30 * 3 * (64 + 4) == 12_240
        given = kv_format_of(name).with_tensor_scales(0.1, 0.1)
        assert 2 * bundled.bytes_per_token(given) == bundled.bytes_per_token("bf16")
    assert KvLayout((KvLayer(1, 576, 0),), "latent").bytes_per_token("int8") == 576 + 4
