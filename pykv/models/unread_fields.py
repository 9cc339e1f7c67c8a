"""Fields of configs that decide what a model keeps or weighs and that are not read: a model that has one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pykv.errors import UnsupportedModelError
from pykv.field_checks import shown

__all__ = ["NotSaidError", "refuse_unread_kv", "refuse_unread_weights"]

BY_NUMBERS = (
    "its numbers, given to `pykv plan`: num_layers, num_kv_heads, head_dim, window, latent_dim, state_bytes"
)
WEIGHTS_GIVEN = "a config without it, or num_parameters or weights_bytes given"
SHOWN = 60
"""Characters of a value in a message: a list of layers is long."""


class NotSaidError(UnsupportedModelError):
    """A config that may be sound does not say what is asked, in a form that is read here."""


class Fields(Protocol):
    """What this module asks of a config."""

    def find(self, *names: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Unread:
    """A field that is not read.

    Attributes:
        name: of the field.
        decides: what it changes.
        changes: whether this value of it does; by default all but None, false, 0 and what is empty.
        unless: fields that say the same and are read.
    """

    name: str
    decides: str
    changes: Callable[[Any], bool] = bool
    unless: tuple[str, ...] = ()


def _lists_another_than(*usual: object) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, list) or any(one not in usual for one in value)


def _above_one(value: object) -> bool:
    return value not in (None, False, 0, 1)


LISTED = ("layer_types",)

KV_FIELDS = (
    _Unread("attn_type_list", "which layers are linear attention", _lists_another_than(1), LISTED),
    _Unread("linear_attn_config", "which layers are linear attention"),
    _Unread("full_attn_idxs", "which layers are attention", unless=LISTED),
    _Unread("layer_group_size", "which layers are linear attention", _above_one, LISTED),
    _Unread("mixer_types", "which layers are linear attention", unless=LISTED),
    _Unread("block_configs", "the heads of each layer"),
    _Unread("num_attention_groups", "the KV heads"),
    _Unread("use_cla", "which layers read another's keys and values"),
    _Unread("cla_share_factor", "which layers read another's keys and values", _above_one, ("use_cla",)),
    _Unread("kv_reuse_group", "which layers read another's keys and values"),
    _Unread("hybrid_layer_pattern", "which layers have a window"),
    _Unread("swa_num_key_value_heads", "the KV heads of layers with a window"),
    _Unread("swa_head_dim", "the head size of layers with a window"),
    _Unread("index_head_dim", "the keys of an indexer beside each latent"),
    _Unread("cross_attention_layers", "which layers keep an image's keys and values"),
    _Unread("d_kv", "the head size of encoder and decoder"),
    _Unread("expert_ffn_hidden_size", "two attentions in each of num_layers"),
)
"""In the text part of a config, what changes keys and values."""

KV_MODELS = {
    "longcat_flash": "each of its num_layers has two attentions",
}
"""Values of `model_type` of which nothing else in the config says that they keep something else."""

WEIGHT_FIELDS = (
    _Unread("moe_num_experts", "the experts", _above_one),
    _Unread("moe_layers_enum", "which layers have experts"),
    _Unread("moe_layer_start_index", "which layers have experts"),
    _Unread("moe_layer_freq", "which layers have experts", lambda value: value not in (None, 1)),
    _Unread("block_auto_adjust_ff_dim", "the size of the feed-forward"),
    _Unread("shared_intermediate_size", "the size of a feed-forward that all tokens pass"),
    _Unread("hybrid_layer_ids", "which layers have a feed-forward"),
    _Unread("share_q_dim", "the matrices of the queries"),
    _Unread("ffn_multipliers", "the feed-forward of each layer"),
    _Unread("hybrid_override_pattern", "which layers have a feed-forward"),
)
"""What changes the number of parameters alone."""


def refuse_unread_kv(fields: Fields) -> None:
    """Refuses a config in which a field that is not read decides what its layers keep.

    Raises:
        UnsupportedModelError: it has one; the message names the field, its value and what is allowed.
    """
    family = fields.find("model_type")
    for name, why in KV_MODELS.items():
        if family == name:
            raise UnsupportedModelError(
                f"check 'layout': model_type is {shown(family)}: {why}: allowed is {BY_NUMBERS}"
            )
    found = _first(fields, KV_FIELDS)
    if found is not None:
        raise UnsupportedModelError(
            f"check 'layout': {_said(found, fields)}: allowed is a config without it, or {BY_NUMBERS}"
        )


def refuse_unread_weights(fields: Fields) -> None:
    """Refuses to count the parameters of a config in which a field that is not read decides them.

    Raises:
        NotSaidError: it has one; the message names the field, its value and what is allowed.
    """
    found = _first(fields, WEIGHT_FIELDS)
    if found is not None:
        raise NotSaidError(f"check 'weights': {_said(found, fields)}: allowed is {WEIGHTS_GIVEN}")


def _first(fields: Fields, rows: tuple[_Unread, ...]) -> _Unread | None:
    for row in rows:
        value = fields.find(row.name)
        if value is not None and row.changes(value) and fields.find(*row.unless) is None:
            return row
    return None


def _said(row: _Unread, fields: Fields) -> str:
    value = fields.find(row.name)
    shown = "an object" if isinstance(value, Mapping) else repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    return f"{row.name} is {shown}, which decides {row.decides} and is not read"
