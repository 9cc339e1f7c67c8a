"""What one rank of a tensor-parallel group holds of the KV cache."""

from __future__ import annotations

from dataclasses import replace

from pykv.layout import KvLayer, KvLayout
from pykv.planner.checks import refused

__all__ = ["check_ranks", "layout_of_rank"]


def layout_of_rank(layout: KvLayout, tensor_parallel: int) -> KvLayout:
    """The layout of one rank's cache.

    KV heads are shared out over the ranks; where there are more ranks than heads each head is held by several. A latent
    serves all heads, so every rank holds it whole.

    Raises:
        ConfigError: neither do the ranks divide a layer's KV heads, nor the heads the ranks.
    """
    return replace(layout, layers=tuple(_of_rank(layer, tensor_parallel) for layer in layout.layers))


def check_ranks(num_heads: int | None, tensor_parallel: int) -> None:
    """Refuses ranks that do not divide a model's query heads.

    Raises:
        ConfigError: they do not.
    """
    if num_heads is not None and num_heads % tensor_parallel:
        allowed = f"a divisor of the model's {num_heads} query heads"
        raise refused(
            "tensor_parallel", tensor_parallel, f"{allowed}; where it is not given, all GPUs are ranks"
        )


def _of_rank(layer: KvLayer, ranks: int) -> KvLayer:
    if layer.head_dim_v == 0:
        return layer
    heads = layer.num_kv_heads
    if heads % ranks and ranks % heads:
        raise refused(
            "tensor_parallel", ranks, f"a divisor of the {heads} KV heads of a layer, or a multiple of them"
        )
    return replace(layer, num_kv_heads=max(1, heads // ranks))
