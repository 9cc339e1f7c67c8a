"""Which layers of a model look back without limit, and which through a sliding window."""

from __future__ import annotations

from typing import Any, Protocol

from pykv.errors import UnsupportedModelError
from pykv.field_checks import is_integer, refuse, shown

__all__ = ["FULL", "SLIDING", "layer_kinds", "layer_window"]

FULL = "full_attention"
SLIDING = "sliding_attention"

# Names of layer kinds in configs, old and new, and what they mean here.
KINDS = {FULL: FULL, SLIDING: SLIDING, "attention": FULL, "global": FULL, "local": SLIDING}

# Families whose config.json may leave the pattern out: each n-th layer is full, the others have the window.
DEFAULT_PERIODS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
    "gemma3": 6,
    "gemma4_text": 6,
}
OFF_BY_DEFAULT = ("qwen2", "qwen3")
"""Families whose window is off where `use_sliding_window` is not given."""
PERIOD_FIELDS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
WINDOW_FIELDS = ("sliding_window", "window_size")
LIST_FIELDS = ("layer_types", "layers_block_type", "attention_layers")


class Fields(Protocol):
    """What this module asks of a config."""

    def find(self, *names: str) -> Any: ...

    def count(self, *names: str) -> int | None: ...

    def number(self, name: str) -> int: ...

    def flag(self, name: str) -> bool | None: ...

    def text(self, name: str) -> str | None: ...


def layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """`FULL` or `SLIDING` for each layer.

    Raises:
        UnsupportedModelError: the config names a layer of another kind, or lists another number of layers.
    """
    listed = fields.find(*LIST_FIELDS)
    if listed is not None:
        return _checked_kinds(listed, num_layers)
    if not _has_window(fields):
        return [FULL] * num_layers
    return _derived_kinds(fields, num_layers)


def layer_window(fields: Fields, kind: str) -> int | None:
    """The window of a layer of this kind, in tokens, the query's own included; None: no window."""
    if kind == FULL:
        return None
    window = fields.count(*WINDOW_FIELDS)
    if window is None:
        raise UnsupportedModelError(
            "check 'layout': a layer is 'sliding_attention' but sliding_window is not given"
        )
    return window


def _checked_kinds(listed: object, num_layers: int) -> list[str]:
    if not isinstance(listed, list | tuple):
        raise UnsupportedModelError(
            f"check 'layer types': {' or '.join(LIST_FIELDS)} is {shown(listed)}: allowed is a list"
        )
    for index, kind in enumerate(listed):
        if not isinstance(kind, str) or kind not in KINDS:
            raise UnsupportedModelError(
                f"check 'layer types': layer {index} is {shown(kind)}; served are {FULL!r} and {SLIDING!r}"
            )
    if len(listed) != num_layers:
        raise UnsupportedModelError(f"check 'layer types': {len(listed)} are listed for {num_layers} layers")
    return [KINDS[kind] for kind in listed]


def _has_window(fields: Fields) -> bool:
    """Qwen's configs carry a window that `use_sliding_window` turns on."""
    used = fields.flag("use_sliding_window")
    if used is None:
        used = not (fields.text("model_type") or "").startswith(OFF_BY_DEFAULT)
    return used and bool(fields.find("sliding_window"))


def _derived_kinds(fields: Fields, num_layers: int) -> list[str]:
    period = _period(fields)
    if isinstance(period, str):  # such as "LLLG": local, local, local, global
        return [FULL if period[index % len(period)] == "G" else SLIDING for index in range(num_layers)]
    if period is not None:
        return [SLIDING if (index + 1) % period else FULL for index in range(num_layers)]
    first = fields.number("max_window_layers") if fields.flag("use_sliding_window") else 0
    return [SLIDING if index >= first else FULL for index in range(num_layers)]


def _period(fields: Fields) -> int | str | None:
    for name in PERIOD_FIELDS:
        value = fields.find(name)
        if value is None:
            continue
        if isinstance(value, str) and value and set(value) <= {"L", "G"}:
            return value
        if not is_integer(value) or value < 1:
            allowed = "an integer of at least 1, or a text of L and G"
            refuse(f"check 'layout': {name}", value, allowed, UnsupportedModelError)
        return int(value)
    return DEFAULT_PERIODS.get(fields.text("model_type") or "")
