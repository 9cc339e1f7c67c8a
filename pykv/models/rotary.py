"""How long sequences may get before a model's rotary embedding depends on who else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pykv.errors import UnsupportedModelError
from pykv.field_checks import shown

__all__ = ["rotary_limit"]


def rotary_limit(config: Any) -> int | None:
    """The most tokens of a sequence for which the rotary frequencies are the same in every batch.

    transformers chooses the frequencies of `longrope` and `dynamic` once a forward, from the largest position
    in it. Below this limit the choice is always the same; beyond it, one long sequence changes all others.

    Args:
        config: the config of the model's text part.

    Returns:
        None: there is no limit; the frequencies are fixed.

    Raises:
        UnsupportedModelError: the frequencies depend on the batch and the config does not say from where.
    """
    limits = [_limit_of(parameters, config) for parameters in _all_parameters(config)]
    return min((limit for limit in limits if limit is not None), default=None)


def _all_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """One set of rotary parameters for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (part for part in parameters.values() if isinstance(part, Mapping))


def _limit_of(parameters: Mapping[str, Any], config: Any) -> int | None:
    kind = str(parameters.get("rope_type", "default"))
    if kind == "longrope":
        limit = parameters.get("original_max_position_embeddings")
    elif "dynamic" in kind:
        limit = getattr(config, "max_position_embeddings", None)
    else:
        return None
    if not isinstance(limit, int):
        raise UnsupportedModelError(
            f"check 'rotary': rope_type is {shown(kind)}, and no length is given up to which it is fixed"
        )
    return limit
