"""The GPU backend: the Triton kernels of `pykv.kernels`.

It never reads a tensor's values, so its calls can be captured by a CUDA graph, and it writes no slot but the named
ones. float64 is refused. Tensors on a CPU are served only by Triton's interpreter (TRITON_INTERPRET=1 before the first
import), for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pykv.extras import needs_extra

with needs_extra("the triton backend", "torch"):
    import pykv.kernels.operators as operators
    from pykv.kernels.arguments import Batch, Caches, Rule
    from pykv.kernels.attend import allocate_workspace

__all__ = ["copy_blocks", "paged_attention", "write_kv"]


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
) -> Tensor:
    """See `pykv.attention.paged_attention`."""
    rule = Rule(scale, window or 0, softcap or 0.0, sinks)
    batch = Batch(block_tables, seq_lens, query_starts, table_rows)
    workspace = allocate_workspace(query, Caches(key_cache, value_cache), batch, rule)
    operators.paged_attention(
        out,
        None,
        None if workspace is None else workspace.out,
        None if workspace is None else workspace.lse,
        query,
        key_cache,
        value_cache,
        None,
        block_tables,
        seq_lens,
        query_starts,
        table_rows,
        sinks,
        rule.scale,
        rule.window,
        rule.softcap,
    )
    return out


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `pykv.attention.write_kv`."""
    operators.write_kv(key, value, key_cache, value_cache, None, slot_mapping)


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor) -> None:
    """See `pykv.attention.copy_blocks`."""
    for key_cache, value_cache in zip(key_caches, value_caches, strict=True):
        operators.copy_blocks(key_cache, value_cache, None, pairs)
