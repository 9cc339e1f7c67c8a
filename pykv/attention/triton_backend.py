"""The GPU backend: the Triton kernels of `pykv.kernels`.

It never reads a tensor's values, so its calls can be captured by a CUDA graph, and it writes no slot but the named
ones. float64 is refused. Tensors on a CPU are served only by Triton's interpreter (TRITON_INTERPRET=1 before the first
import), for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention.layer_cache import LayerCache
from pykv.extras import needs_extra

with needs_extra("the triton backend", "torch"):
    import pykv.kernels.operators as operators
    from pykv.kernels.arguments import Batch, Caches, Rule
    from pykv.kernels.attend import allocate_workspace

__all__ = ["copy_blocks", "paged_attention", "transfer_blocks", "write_kv"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    kv_scales: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    share_prefixes: bool = True,
) -> Tensor:
    """See `pykv.attention.paged_attention`; `kv_scales` are for each token and head.

    Args:
        share_prefixes: whether decodes whose tables begin with the same blocks read these together. Which ones they are
            is found on the device, in two more launches: false where the caller knows that there are none.
    """
    rule = Rule(scale, window or 0, softcap or 0.0, sinks)
    batch = Batch(block_tables, seq_lens, query_starts, table_rows)
    caches = Caches(key_cache, value_cache, kv_scales)
    workspace = allocate_workspace(query, caches, batch, rule, share_prefixes=share_prefixes)
    lse = log_sum_exp
    if log_sum_exp is not None and not log_sum_exp.is_contiguous():
        lse = torch.empty_like(log_sum_exp, memory_format=torch.contiguous_format)
    operators.paged_attention(
        out,
        lse,
        None if workspace is None else workspace.out,
        None if workspace is None else workspace.lse,
        query,
        key_cache,
        value_cache,
        kv_scales,
        block_tables,
        seq_lens,
        query_starts,
        table_rows,
        sinks,
        rule.scale,
        rule.window,
        rule.softcap,
        None if workspace is None else workspace.prefixes,
        0 if workspace is None else workspace.num_prefix_splits,
    )
    if log_sum_exp is not None and lse is not None and lse is not log_sum_exp:
        log_sum_exp.copy_(lse)
    return out


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """See `pykv.attention.write_kv`; `kv_scales` are for each token and head."""
    operators.write_kv(key, value, key_cache, value_cache, kv_scales, slot_mapping)


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor) -> None:
    """See `pykv.attention.copy_blocks`."""
    for key_cache, value_cache in zip(key_caches, value_caches, strict=True):
        operators.copy_blocks(key_cache, value_cache, None, pairs)


def transfer_blocks(sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor) -> None:
    """See `pykv.attention.transfer_blocks`."""
    for source, target in zip(sources, targets, strict=True):
        operators.transfer_blocks(
            source.key, source.value, source.row_scales, target.key, target.value, target.row_scales, pairs
        )
