"""The kernels as operators of torch: what they change is declared, nothing is allocated, nothing read by the host.

`torch.compile` takes them without a graph break, and a CUDA graph may capture them.
"""

from __future__ import annotations

from torch import Tensor, library

from pykv.kernels.arguments import Batch, Caches, Result, Rule, Workspace
from pykv.kernels.attend import attend
from pykv.kernels.copy_blocks import launch_copy_blocks
from pykv.kernels.target import on_device_of
from pykv.kernels.write_kv import launch_write_kv

__all__ = ["copy_blocks", "paged_attention", "transfer_blocks", "write_kv"]


@library.custom_op("pykv::triton_write_kv", mutates_args=("key_cache", "value_cache", "scales"))
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
) -> None:
    """See `launch_write_kv`."""
    with on_device_of(key):
        launch_write_kv(key, value, Caches(key_cache, value_cache, scales), slot_mapping)


@library.custom_op("pykv::triton_copy_blocks", mutates_args=("key_cache", "value_cache", "scales"))
def copy_blocks(key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, pairs: Tensor) -> None:
    """Copies blocks of one layer inside its pool; see `launch_copy_blocks`."""
    caches = Caches(key_cache, value_cache, scales)
    with on_device_of(pairs):
        launch_copy_blocks(caches, caches, pairs)


@library.custom_op(
    "pykv::triton_transfer_blocks", mutates_args=("key_target", "value_target", "scales_target")
)
def transfer_blocks(
    key_source: Tensor,
    value_source: Tensor,
    scales_source: Tensor | None,
    key_target: Tensor,
    value_target: Tensor,
    scales_target: Tensor | None,
    pairs: Tensor,
) -> None:
    """Copies blocks of one layer from one pool to another; see `launch_copy_blocks`."""
    source = Caches(key_source, value_source, scales_source)
    with on_device_of(pairs):
        launch_copy_blocks(source, Caches(key_target, value_target, scales_target), pairs)


@library.custom_op(
    "pykv::triton_paged_attention", mutates_args=("out", "lse", "partial_out", "partial_lse", "prefixes")
)
def paged_attention(
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    prefixes: Tensor | None,
    num_prefix_splits: int,
) -> None:
    """See `attend`; partial_out and partial_lse, prefixes and num_prefix_splits are the workspace, or none of them.

    Nothing has a default: torch 2.11 leaves defaults out of the arguments in which it looks for what is changed.
    """
    workspace = None
    if partial_out is not None and partial_lse is not None:
        workspace = Workspace(partial_out, partial_lse, prefixes, num_prefix_splits)
    with on_device_of(query):
        attend(
            query,
            Caches(key_cache, value_cache, scales),
            Batch(block_tables, seq_lens, query_starts, table_rows),
            Rule(scale, window, softcap, sinks),
            Result(out, lse),
            workspace,
        )


@write_kv.register_fake
def _(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
) -> None:
    return None


@copy_blocks.register_fake
def _(key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, pairs: Tensor) -> None:
    return None


@transfer_blocks.register_fake
def _(
    key_source: Tensor,
    value_source: Tensor,
    scales_source: Tensor | None,
    key_target: Tensor,
    value_target: Tensor,
    scales_target: Tensor | None,
    pairs: Tensor,
) -> None:
    return None


@paged_attention.register_fake
def _(
    out: Tensor,
    lse: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    prefixes: Tensor | None,
    num_prefix_splits: int,
) -> None:
    return None
