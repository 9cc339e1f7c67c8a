"""Reads a model's config, whose field names differ from family to family, into the layers of its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pykv.errors import UnsupportedModelError
from pykv.field_checks import as_integer, shown
from pykv.kv_layer import Config, KvLayer, Storage
from pykv.models.layer_windows import layer_kinds, layer_window
from pykv.models.unread_fields import NotSaidError, refuse_unread_kv

__all__ = ["ConfigFields", "read_layers"]

# One row a fact, the usual name first; the others are of gpt-2, falcon, bloom, mpt, openelm and chatglm.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "decoder")


LARGEST_FIELD = 2**40
"""Of any number in a config: what is larger is no model's."""
MOST_LAYERS = 10_000


_Field = TypeVar("_Field", bool, str)


class ConfigFields:
    """One face over config objects and mappings: a field that is absent or null counts as missing."""

    def __init__(self, config: Config) -> None:
        self._get: Callable[[str], Any] = _getter(_text_part(config))

    def find(self, *names: str) -> Any:
        """The first of these fields that is there, else None."""
        values = (self._get(name) for name in names)
        return next((value for value in values if value is not None), None)

    def count(self, *names: str) -> int | None:
        """The first of these fields that is there, checked to be a positive whole number.

        Raises:
            UnsupportedModelError: it is something else.
        """
        for name in names:
            value = self._get(name)
            if value is not None:
                return _positive(name, value)
        return None

    def needed(self, *names: str) -> int:
        """As `count`, for a field that the formula cannot do without."""
        value = self.count(*names)
        if value is None:
            raise NotSaidError(f"check 'layout': the config has none of the fields {', '.join(names)}")
        return value

    def flag(self, name: str) -> bool | None:
        """A field that is true or false; None: it is missing.

        Raises:
            UnsupportedModelError: it is something else.
        """
        return self._of_type(name, bool, "true and false")

    def text(self, name: str) -> str | None:
        """A field that is a text; None: it is missing.

        Raises:
            UnsupportedModelError: it is something else.
        """
        return self._of_type(name, str, "a text")

    def number(self, name: str) -> int:
        """A whole number from 0 on; 0 where it is missing.

        Raises:
            UnsupportedModelError: it is something else.
        """
        value = self._get(name)
        if value is None:
            return 0
        return _whole(name, value, 0)

    def indices(self, name: str) -> list[int] | None:
        """A list of layers, by their numbers; None: it is missing.

        Raises:
            UnsupportedModelError: it is something else.
        """
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise UnsupportedModelError(
                f"check 'layout': {name} is {shown(value)}: allowed is a list of layers"
            )
        return [_whole(name, layer, 0) for layer in value]

    def _of_type(self, name: str, wanted: type[_Field], allowed: str) -> _Field | None:
        value = self._get(name)
        if value is None or isinstance(value, wanted):
            return value
        raise UnsupportedModelError(f"check 'layout': {name} is {shown(value)}: allowed is {allowed}")


def read_layers(config: Config, storage: Storage) -> tuple[KvLayer, ...]:
    """The layers of the KV cache of the model that `config` describes.

    Raises:
        UnsupportedModelError: see `KvLayout.from_config`.
    """
    fields = ConfigFields(config)
    refuse_unread_kv(fields)
    if fields.flag("is_encoder_decoder"):
        raise UnsupportedModelError("check 'layout': is_encoder_decoder is true; only decoders are supported")
    num_layers = fields.needed(*NUM_LAYERS)
    if num_layers > MOST_LAYERS:
        raise UnsupportedModelError(
            f"check 'layout': the config has {num_layers} layers: allowed is at most {MOST_LAYERS:,}"
        )
    kinds = layer_kinds(fields, num_layers)
    shapes = _shapes(fields, storage, kinds)
    reads = _shared_from(fields, kinds)
    windows = [layer_window(fields, kind) for kind in kinds]
    return tuple(
        KvLayer(shape.num_kv_heads, shape.head_dim_k, shape.head_dim_v, window, source)
        for shape, window, source in zip(shapes, windows, reads, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


def _shapes(fields: ConfigFields, storage: Storage, kinds: Sequence[str]) -> list[_Shape]:
    """The shape of each layer's keys and values."""
    if fields.count("kv_lora_rank") is not None:
        return [_latent_shape(fields) if storage == "latent" else _expanded_shape(fields)] * len(kinds)
    return [_plain_shape(_of_layer(fields, index, kind), index) for index, kind in enumerate(kinds)]


def _latent_shape(fields: ConfigFields) -> _Shape:
    """One latent and one rotary key for all heads; the value is the latent part of it."""
    return _Shape(1, fields.needed("kv_lora_rank") + fields.needed("qk_rope_head_dim"), 0)


def _expanded_shape(fields: ConfigFields) -> _Shape:
    """Latent attention as it is computed: the latent projected up to every query head's key and value."""
    num_heads = fields.needed(*NUM_HEADS)
    head_dim_v = fields.count("v_head_dim") or fields.needed(*HIDDEN_SIZE) // num_heads
    return _Shape(
        num_heads, fields.needed("qk_nope_head_dim") + fields.needed("qk_rope_head_dim"), head_dim_v
    )


def _plain_shape(fields: ConfigFields, layer: int) -> _Shape:
    head_dim = fields.count(*HEAD_DIM) or _head_dim_of_hidden(fields, layer)
    return _Shape(_num_kv_heads(fields, layer), head_dim, fields.count("v_head_dim") or head_dim)


def _head_dim_of_hidden(fields: ConfigFields, layer: int) -> int:
    hidden, num_heads = fields.needed(*HIDDEN_SIZE), _num_heads(fields, layer)
    if num_heads > hidden:
        raise UnsupportedModelError(
            f"check 'layout': {num_heads} heads share a hidden size of {hidden}: allowed is at least 1 element each"
        )
    if hidden % num_heads:
        raise UnsupportedModelError(
            f"check 'layout': hidden_size is {hidden}, which {num_heads} heads do not share evenly: allowed is a "
            "multiple of the heads, or head_dim given"
        )
    return hidden // num_heads


def _num_heads(fields: ConfigFields, layer: int) -> int:
    listed = fields.find(*NUM_HEADS, "num_query_heads")
    return (
        _listed("num_query_heads", listed, layer) if isinstance(listed, list) else fields.needed(*NUM_HEADS)
    )


def _num_kv_heads(fields: ConfigFields, layer: int) -> int:
    """Multi-query is one head, wherever a family says so; where nothing is said KV heads are the heads."""
    if fields.flag("multi_query_attention"):
        return fields.needed("multi_query_group_num")
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    listed = fields.find(*NUM_KV_HEADS)
    if isinstance(listed, list):
        return _listed("num_kv_heads", listed, layer)
    nested = ConfigFields(fields.find("attn_config") or {})  # of DBRX
    return fields.count(*NUM_KV_HEADS) or nested.count("kv_n_heads") or _num_heads(fields, layer)


def _of_layer(fields: ConfigFields, index: int, kind: str) -> ConfigFields:
    """The fields as they hold for one layer: a family may give some layers other heads."""
    overrides = _overrides(fields, index, kind)
    return _Overridden(fields, overrides) if overrides else fields


class _Overridden(ConfigFields):
    def __init__(self, fields: ConfigFields, overrides: Mapping[str, Any]) -> None:
        self._get = lambda name: overrides[name] if name in overrides else fields.find(name)


def _overrides(fields: ConfigFields, index: int, kind: str) -> dict[str, Any]:
    """A config that lists single layers does so as objects, or in JSON as a map from the layer's number."""
    listed = fields.find("per_layer_config")
    if isinstance(listed, Mapping):
        return _listed_overrides(listed, index)
    if listed is not None and fields.flag("is_heterogeneous"):
        try:
            shape = ConfigFields(listed[index])
        except (TypeError, LookupError) as error:
            raise UnsupportedModelError(
                f"check 'layout': per_layer_config is {shown(listed)}: allowed is an entry for each layer"
            ) from error
        return {"head_dim": shape.count(*HEAD_DIM), "num_key_value_heads": shape.count(*NUM_KV_HEADS)}
    return _global_overrides(fields) if kind == "full_attention" else {}


def _listed_overrides(listed: Mapping[Any, Any], index: int) -> dict[str, Any]:
    by_layer = {}
    for layer, found in listed.items():
        if not str(layer).isdecimal() or not isinstance(found, Mapping):  # JSON has the keys as "05"
            raise UnsupportedModelError(
                f"check 'layout': per_layer_config has {shown(layer)}: {shown(found)}: allowed is a layer's number, "
                "and an object"
            )
        by_layer[int(layer)] = found
    return dict(by_layer.get(index, {}))


def _global_overrides(fields: ConfigFields) -> dict[str, Any]:
    """Gemma 4's config.json: layers without a window have a head size, and perhaps heads, of their own."""
    overrides = {"head_dim": fields.count("global_head_dim")}
    if fields.flag("attention_k_eq_v"):
        overrides["num_key_value_heads"] = fields.count("num_global_key_value_heads")
    return {name: value for name, value in overrides.items() if value is not None}


def _shared_from(fields: ConfigFields, kinds: Sequence[str]) -> list[int | None]:
    """For each layer the earlier one whose KV it reads: the last of its kind before the layers that share."""
    shared = fields.number("num_kv_shared_layers")
    num_own = max(0, len(kinds) - shared)
    last = {kind: index for index, kind in enumerate(kinds[:num_own])}
    missing = set(kinds[num_own:]) - set(last)
    if missing:
        raise UnsupportedModelError(
            f"check 'layout': num_kv_shared_layers leaves no {shown(missing.pop())} layer with keys of its own"
        )
    return [None] * num_own + [last[kind] for kind in kinds[num_own:]]


def _listed(name: str, values: Sequence[Any], layer: int) -> int:
    """What a config's list says of one layer."""
    if layer >= len(values):
        raise UnsupportedModelError(
            f"check 'layout': {name} lists {len(values)} layers, of which {layer} is none"
        )
    return _positive(name, values[layer])


def _positive(name: str, value: Any) -> int:
    return _whole(name, value, 1)


def _whole(name: str, value: Any, least: int) -> int:
    return as_integer(f"check 'layout': {name}", value, least, LARGEST_FIELD, UnsupportedModelError)


def _text_part(config: Config) -> Config:
    get = _getter(config)
    part = next((get(name) for name in TEXT_PARTS if get(name) is not None), None)
    return config if part is None else part


def _getter(config: Config) -> Callable[[str], Any]:
    if isinstance(config, Mapping):
        return config.get
    return lambda name: getattr(config, name, None)
