"""What decides keys, values or weights and is not read is refused by name, and junk in what is read is too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pykv
from pykv.layout import Config, KvLayout
from pykv.models import kv_fields
from pykv.models.unread_fields import KV_FIELDS, WEIGHT_FIELDS
from pykv.planner.model_facts import read_model
from pykv.planner.options import read_options
from pykv.planner.parameters import estimate_parameters, experts_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
DBRX: dict[str, Any] = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "vocab_size": 100_352,
    "max_seq_len": 32_768,
    "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
}
MAVERICK: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_type_list", [0, 1, 0, 1]),
        ("linear_attn_config", {"full_attn_layers": [4]}),
        ("layer_group_size", 8),
        ("mixer_types", ["minicpm4", "lightning-attn"] * 2),
        ("block_configs", [{"attention": {"no_op": True}}] * 4),
        ("num_attention_groups", 1),
        ("use_cla", True),
        ("cla_share_factor", 2),
        ("kv_reuse_group", [[1, 2]]),
        ("hybrid_layer_pattern", [0, 1, 1, 0]),
        ("swa_num_key_value_heads", 8),
        ("swa_head_dim", 8),
        ("index_head_dim", 128),
        ("cross_attention_layers", [3]),
        ("d_kv", 64),
        ("expert_ffn_hidden_size", 64),
        ("model_type", "longcat_flash"),
    ],
)
def test_what_decides_the_cache_and_is_not_read_is_refused(field: str, value: object) -> None:
    with pytest.raises(pykv.UnsupportedModelError) as refusal:
        pykv.plan(LLAMA | {field: value})
    message = str(refusal.value)
    assert f"{field} is " in message
    assert ": allowed is " in message
    assert "num_kv_heads, head_dim" in message, "how it can be planned all the same"
    with pytest.raises(pykv.UnsupportedModelError, match=f"{field} is "):
        KvLayout.from_config(LLAMA | {field: value})


def test_every_row_of_the_table_is_tried() -> None:
    marks = test_what_decides_the_cache_and_is_not_read_is_refused.pytestmark  # type: ignore[attr-defined]
    tried = {field for field, _ in marks[0].args[1]}
    assert {row.name for row in KV_FIELDS} - tried == {"full_attn_idxs"}, "which the planner reads"


@pytest.mark.parametrize(
    "harmless",
    [
        {"attn_type_list": [1, 1, 1, 1]},
        {"use_cla": False, "cla_share_factor": 2},
        {"layer_group_size": 1},
        {"index_head_dim": None},
        {"cross_attention_layers": []},
        {"mixer_types": ["a"] * 4, "layer_types": ["full_attention"] * 4},
    ],
)
def test_what_changes_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert KvLayout.from_config(LLAMA | harmless) == KvLayout.from_config(LLAMA)


def test_attention_by_its_layers_numbers_leaves_the_others_a_state() -> None:
    lfm2 = LLAMA | {"model_type": "lfm2", "conv_L_cache": 3}
    listed = lfm2 | {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    by_number = pykv.plan(lfm2 | {"full_attn_idxs": [1, 3]})
    assert by_number.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert by_number.state_bytes_per_request == pykv.plan(listed).state_bytes_per_request > 0


@pytest.mark.parametrize("value", [-1, 0, 1.5, "", "LLX", True, [1]])
def test_a_period_of_windows_is_a_number_or_letters(value: object) -> None:
    config = LLAMA | {"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": value}
    with pytest.raises(pykv.UnsupportedModelError, match=r"sliding_window_pattern is .*: allowed is "):
        pykv.plan(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3"])
def test_the_window_of_qwen_is_off_unless_it_is_turned_on(family: str) -> None:
    config = LLAMA | {"model_type": family, "sliding_window": 64}
    assert {layer.window for layer in KvLayout.from_config(config).layers} == {None}
    on = KvLayout.from_config(config | {"use_sliding_window": True, "max_window_layers": 3})
    assert [layer.window for layer in on.layers] == [None, None, None, 64]
    mistral = KvLayout.from_config(config | {"model_type": "mistral"})
    assert {layer.window for layer in mistral.layers} == {64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 65}, "hidden_size is 65, which 8 heads do not share evenly"),
        ({"kv_lora_rank": 16}, "none of the fields qk_rope_head_dim"),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        ({"mamba_d_state": 16}, "mamba_d_state is 16, and which layers are attention is not said"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": [4]}}, r"bits is \[4\]"),
        ({"num_kv_shared_layers": -2}, "num_kv_shared_layers is -2"),
        ({"num_kv_shared_layers": 1.5}, "num_kv_shared_layers is 1.5"),
        ({"num_local_experts": "8"}, "num_local_experts is '8'"),
        ({"num_local_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"num_local_experts": 8, "first_k_dense_replace": "a"}, "first_k_dense_replace is 'a'"),
        ({"num_local_experts": 8, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_a_config_that_does_not_add_up_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(pykv.UnsupportedModelError, match=message):
        pykv.plan(LLAMA | change)


@pytest.mark.parametrize(("config", "billions"), [(DBRX, 131.6), (MAVERICK, 400.7)], ids=["dbrx", "maverick"])
def test_published_parameters_are_met(config: dict[str, Any], billions: float) -> None:
    assert estimate_parameters(config).total / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_experts_of_dbrx_and_of_every_second_layer_are_counted() -> None:
    dbrx, maverick = experts_of(DBRX), experts_of(MAVERICK)
    assert dbrx is not None
    assert (dbrx.num, dbrx.used, dbrx.parameters) == (16, 4, 40 * 16 * 3 * 6144 * 10_752)
    assert maverick is not None
    assert (maverick.num, maverick.used, maverick.parameters) == (128, 1, 24 * 128 * 3 * 5120 * 8192)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_num_experts", 64),
        ("moe_layers_enum", "1,2"),
        ("moe_layer_start_index", 1),
        ("moe_layer_freq", [0, 1, 1, 1]),
        ("block_auto_adjust_ff_dim", True),
        ("shared_intermediate_size", 64),
        ("share_q_dim", 64),
        ("ffn_multipliers", [1, 2]),
        ("hybrid_layer_ids", [1]),
    ],
)
def test_weights_that_another_field_decides_must_be_given(field: str, value: object) -> None:
    config = LLAMA | {field: value}
    assert pykv.plan(config).weights_bytes is None
    with pytest.raises(pykv.ConfigError, match=rf"num_parameters is None: allowed is .*{field} is "):
        pykv.plan(config, memory="80GiB")
    assert pykv.plan(config, memory="80GiB", weights_bytes="1GB").weights_bytes == 10**9


def test_every_row_of_the_weights_table_is_tried() -> None:
    marks = test_weights_that_another_field_decides_must_be_given.pytestmark  # type: ignore[attr-defined]
    tried = {field for field, _ in marks[0].args[1]}
    assert {row.name for row in WEIGHT_FIELDS} - tried == {"hybrid_override_pattern"}, "below"
    nemotron = LLAMA | MAMBA | {"hybrid_override_pattern": "M-*-", "mamba_num_heads": 4, "mamba_head_dim": 8}
    planned = pykv.plan(nemotron | {"n_groups": 1, "conv_kernel": 4})
    assert planned.weights_bytes is None


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "quantized": LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "experts": LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "latent": LLAMA | LATENT | {"num_key_value_heads": 8, "q_lora_rank": 16, "n_routed_experts": 4},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "sliding_window": 64},
    "shared": LLAMA | {"model_type": "gemma3n_text", "sliding_window": 64, "num_hidden_layers": 10},
    "gemma4": LLAMA | {"model_type": "gemma4_text", "sliding_window": 64, "global_head_dim": 16},
    "qwen2": LLAMA | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True},
    "delta": LLAMA | DELTA | {"model_type": "qwen3_next"},
    "jamba": LLAMA | MAMBA | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1},
    "bamba": LLAMA | MAMBA | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
    "lfm2": LLAMA | {"conv_L_cache": 3, "full_attn_idxs": [1]},
    "listed": LLAMA | {"layer_types": ["full_attention"] * 4},
    "falcon": LLAMA | {"model_type": "falcon", "multi_query": True, "num_key_value_heads": None},
    "per_layer": LLAMA | {"is_heterogeneous": True, "per_layer_config": [{"head_dim": 8}] * 4},
    "dbrx": DBRX,
    "maverick": MAVERICK,
}  # fmt: skip
JUNK = (
    -2,
    0,
    1.5,
    float("nan"),
    True,
    "8",
    "",
    "a",
    [],
    [3],
    ["a"],
    [[1]],
    [None] * 4,
    {},
    {"a": 1},
    {"0": 3},
    10**30,
)


def read(config: dict[str, Any]) -> None:
    read_model(read_options({"model": config}))


def fields_read(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every field that is asked for while a config is read, whether it is there or not."""
    asked: set[str] = set()
    getter = kv_fields._getter

    def recording(of: Config) -> Callable[[str], Any]:
        get = getter(of)

        def asking(name: str) -> Any:
            asked.add(name)
            return get(name)

        return asking

    with monkeypatch.context() as patch:
        patch.setattr(kv_fields, "_getter", recording)
        read(config)
    return asked | {"quantization_config", "torch_dtype", "dtype"}


@pytest.mark.parametrize("family", FAMILIES)
def test_junk_in_any_field_is_a_config_or_a_clear_error(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES[family]
    asked = fields_read(config, monkeypatch)
    assert len(asked) > 40
    refused = 0
    for name in sorted(asked):
        for junk in JUNK:
            try:
                read(config | {name: junk})
            except pykv.PykvError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{name} = {junk!r} ends in {type(error).__name__}: {error}")
    assert refused > 200
