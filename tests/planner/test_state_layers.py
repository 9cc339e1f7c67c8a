"""Layers that keep a state: their number, their bytes, and what is left of attention."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pykv import UnsupportedModelError
from pykv.planner import plan
from pykv.planner.state_layers import split_layers

DELTA_NET = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA_2 = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}


def test_delta_net_by_hand() -> None:
    attention, state = split_layers(DELTA_NET)
    recurrent, conv = 4 * 8 * 16, (2 * 2 * 16 + 4 * 8) * 3
    assert state.num_layers == 3
    assert state.bytes_per_sequence == 3 * (recurrent * 4 + conv * 2)
    assert attention["num_hidden_layers"] == 1


def test_mamba_2_by_hand() -> None:
    inner = 8 * 16
    assert split_layers(MAMBA_2)[1].bytes_per_sequence == inner * 32 * 4 + (inner + 2 * 32) * 3 * 2
    half = split_layers(MAMBA_2 | {"mamba_ssm_dtype": "bfloat16"})[1]
    assert half.bytes_per_sequence == inner * 32 * 2 + (inner + 2 * 32) * 3 * 2


def test_shipped_hybrids() -> None:
    jamba, qwen = plan("AI21-Jamba-Mini-1.5"), plan("Qwen3-Next-80B-A3B-Instruct")
    assert (jamba.groups[0].num_layers, qwen.groups[0].num_layers) == (4, 12)
    assert jamba.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2
    assert qwen.state_bytes_per_request == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert jamba.engine_kv_bytes_per_token is None
    assert "keep a state" in jamba.engine_refusal
    assert jamba.storage == "formula"


def test_pattern_of_letters_leaves_out_layers_without_memory() -> None:
    config = MAMBA_2 | {"layer_types": None, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}
    attention, state = split_layers(config)
    assert (attention["num_hidden_layers"], state.num_layers) == (1, 1)


def test_state_takes_room_of_every_request() -> None:
    numbers: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "context": 16}
    plain = plan(**numbers, num_blocks=101, storage="formula").requests
    with_state = plan(**numbers, num_blocks=101, state_bytes=512).requests
    assert plain is not None
    assert with_state is not None
    assert (plain["p50"], with_state["p50"]) == (100, 50)  # a block has 512 bytes too


def test_unknown_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'strange'.*state_bytes"):
        split_layers({"model_type": "strange", "layer_types": ["recurrent", "attention"]})


@pytest.mark.parametrize(
    ("family", "given", "num_attention"),
    [
        ("qwen3_next", {}, 12),
        ("qwen3_5_text", {}, 8),
        ("jamba", {}, 4),
        ("bamba", {"attn_layer_indices": [9, 18, 27]}, 3),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 16}, 16),
        ("nemotron_h", {}, 1),
        ("zamba2", {}, 9),
        ("falcon_h1", {}, 32),
        ("lfm2", {"full_attn_idxs": [2, 5]}, 2),
    ],
)
def test_config_of_transformers_is_read(family: str, given: dict[str, Any], num_attention: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = json.loads(json.dumps(transformers.AutoConfig.for_model(family, **given).to_dict()))
    found = plan(config)
    assert found.state_bytes_per_request > 0
    assert sum(group.num_layers for group in found.groups) == num_attention


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv"])
def test_models_without_attention_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no layer is attention"):
        split_layers({"model_type": family, "num_hidden_layers": 2})
