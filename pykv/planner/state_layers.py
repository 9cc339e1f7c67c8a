"""Layers that keep a state of fixed size for each sequence instead of keys and values: linear attention, SSM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pykv.errors import UnsupportedModelError
from pykv.field_checks import shown
from pykv.models.kv_fields import ConfigFields

__all__ = ["StateLayers", "split_layers"]

CONV_BYTES = 2
"""Of an element of a convolution's last inputs: they have the dtype of the activations."""
RECURRENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of an element of a recurrent state: float32 unless the config has it otherwise (`mamba_ssm_dtype`)."""

ATTENTION = "full_attention"
STATES_ALONE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Families without attention."""
BOTH = ("falcon_h1",)
"""Families whose every layer has attention and a state side by side."""


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The layers of a model that keep a state.

    Attributes:
        num_layers: how many.
        bytes_per_sequence: of all their states for one sequence, however long it is.
    """

    num_layers: int = 0
    bytes_per_sequence: int = 0


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a layer keeps: keys and values of this kind of attention (None: none), a state, both or nothing."""

    attention: str | None
    state: bool


def split_layers(config: Mapping[str, Any]) -> tuple[dict[str, Any], StateLayers]:
    """Parts a config into its attention layers alone, as a config, and its state layers.

    Raises:
        UnsupportedModelError: state layers are named whose size cannot be read, or no layer is attention.
    """
    layers = _memories(config)
    if layers is None or all(layer.attention and not layer.state for layer in layers):
        return dict(config), StateLayers()
    attention = [index for index, layer in enumerate(layers) if layer.attention]
    if not attention:
        raise UnsupportedModelError("check 'layout': no layer is attention: there is no KV cache that grows")
    num_state = sum(layer.state for layer in layers)
    num_bytes = num_state * _state_bytes(config) if num_state else 0
    return _only(config, attention, layers), StateLayers(num_state, num_bytes)


def _memories(config: Mapping[str, Any]) -> list[_Memory] | None:
    """What each layer keeps; None: all are attention."""
    fields = ConfigFields(config)
    family = fields.text("model_type")
    if family in STATES_ALONE:
        return [STATE]
    pattern = fields.find("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [LETTERS.get(letter, _Memory(letter, False)) for letter in pattern]
    listed = fields.find("layer_types", "layers_block_type", "block_types")
    if isinstance(listed, list):
        return [KINDS.get(str(kind), _Memory(str(kind), False)) for kind in listed]
    num_layers = fields.count("num_hidden_layers") or 0
    if family in BOTH:
        return [_Memory(ATTENTION, True)] * num_layers
    indices = _attention_indices(fields, num_layers)
    return None if indices is None else [FULL if index in indices else STATE for index in range(num_layers)]


def _attention_indices(fields: ConfigFields, num_layers: int) -> set[int] | None:
    """The layers that are attention where the others keep a state; None: nothing says so."""
    if fields.find("linear_num_value_heads"):
        interval = fields.count("full_attention_interval") or 4
        return set(range(interval - 1, num_layers, interval))
    if fields.find("attn_layer_period"):
        return set(range(fields.number("attn_layer_offset"), num_layers, fields.needed("attn_layer_period")))
    if fields.find("mamba_d_state"):
        indices = fields.indices("attn_layer_indices")
        if indices is None:
            raise UnsupportedModelError(
                f"check 'layout': mamba_d_state is {shown(fields.find('mamba_d_state'))}, and which layers are "
                "attention is not said: allowed is layer_types, attn_layer_period or attn_layer_indices beside it, or "
                "its numbers"
            )
        return set(indices)
    listed = fields.indices("full_attn_idxs")
    return None if listed is None else set(listed)


def _only(config: Mapping[str, Any], kept: list[int], layers: list[_Memory]) -> dict[str, Any]:
    """The config of a model of these layers alone: what is listed layer by layer is thinned out."""
    thinned = {
        name: [value[index] for index in kept]
        if isinstance(value, list) and len(value) == len(layers)
        else value
        for name, value in config.items()
        if name not in ("hybrid_override_pattern", "layers_block_type", "block_types")
    }
    return thinned | {
        "num_hidden_layers": len(kept),
        "layer_types": [layers[index].attention for index in kept],
    }


def _state_bytes(config: Mapping[str, Any]) -> int:
    """The bytes of one layer's state."""
    fields = ConfigFields(config)
    size = next(size for named_by, size in SIZES if not named_by or fields.find(*named_by))
    recurrent, conv = size(fields)
    dtype = fields.text("mamba_ssm_dtype") or fields.text("mamba_ssm_cache_dtype") or "float32"
    if dtype not in RECURRENT_BYTES:
        raise UnsupportedModelError(
            f"check 'state layers': mamba_ssm_dtype is {shown(dtype)}: allowed are {', '.join(RECURRENT_BYTES)}"
        )
    return recurrent * RECURRENT_BYTES[dtype] + conv * CONV_BYTES


def _delta_net(fields: ConfigFields) -> tuple[int, int]:
    keys = fields.needed("linear_num_key_heads") * fields.needed("linear_key_head_dim")
    values = fields.needed("linear_num_value_heads") * fields.needed("linear_value_head_dim")
    kernel = fields.needed("linear_conv_kernel_dim")
    return values * fields.needed("linear_key_head_dim"), (2 * keys + values) * (kernel - 1)


def _mamba_2(fields: ConfigFields) -> tuple[int, int]:
    inner = fields.needed(*MAMBA_HEADS) * fields.needed("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    states = fields.needed("mamba_d_state", "ssm_state_size")
    groups = fields.needed("mamba_n_groups", "mamba_ngroups", "n_groups")
    return inner * states, (inner + 2 * groups * states) * (fields.needed("mamba_d_conv", "conv_kernel") - 1)


def _mamba_1(fields: ConfigFields) -> tuple[int, int]:
    inner = fields.needed("hidden_size") * fields.needed("mamba_expand")
    return inner * fields.needed("mamba_d_state"), inner * (fields.needed("mamba_d_conv") - 1)


def _short_convolution(fields: ConfigFields) -> tuple[int, int]:
    return 0, fields.needed("hidden_size") * (fields.needed("conv_L_cache") - 1)


def _unknown(fields: ConfigFields) -> tuple[int, int]:
    raise UnsupportedModelError(
        f"check 'state layers': the sizes of the state layers of {shown(fields.find('model_type'))} are not known; "
        "give the model by numbers, with state_bytes"
    )


FULL, STATE, NOTHING = _Memory(ATTENTION, False), _Memory(None, True), _Memory(None, False)
KINDS = {
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), STATE),
    **dict.fromkeys(("moe", "mlp"), NOTHING),
    "hybrid": _Memory(ATTENTION, True),
}
"""What the kinds of layers in a config keep; all others are attention."""
LETTERS = {"M": STATE, "*": FULL, "-": NOTHING, "E": NOTHING}
"""The same, as nemotron_h writes it."""
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")

# The first row of which a field is there: (elements of the recurrent state, of the convolution) of one layer.
SIZES: tuple[tuple[tuple[str, ...], Callable[[ConfigFields], tuple[int, int]]], ...] = (
    (("linear_num_value_heads",), _delta_net),
    (MAMBA_HEADS, _mamba_2),
    (("mamba_d_state",), _mamba_1),
    (("conv_L_cache",), _short_convolution),
    ((), _unknown),
)
