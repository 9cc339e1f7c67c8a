"""Which kernels a batch needs: decided from shapes alone, so that a CUDA graph can be captured."""

from __future__ import annotations

import torch
from torch import Tensor

from pykv.kernels.arguments import Batch, Caches, Result, Rule, Workspace, padded, query_rows
from pykv.kernels.decode import decode_every_token, decode_single_rows
from pykv.kernels.decode_reduce import reduce_every_token, reduce_single_rows
from pykv.kernels.prefill import launch_prefill
from pykv.kernels.splits import choose_num_splits
from pykv.kernels.target import current_target
from pykv.kernels.tile_config import TileConfig, TileShape, decode_config, prefill_config

__all__ = ["allocate_workspace", "attend"]


def attend(
    query: Tensor, caches: Caches, batch: Batch, rule: Rule, result: Result, workspace: Workspace | None
) -> None:
    """Fills the whole result.

    Where there are no more tokens than rows, decode takes every token. Otherwise prefill takes the rows with several
    tokens and what belongs to no row, and decode the rows with one.

    Args:
        workspace: as `allocate_workspace` makes it for these shapes.
    """
    if query.shape[0] == 0:
        return
    config = _decode_config(query, caches)
    if query.shape[0] <= batch.num_rows:
        decode_every_token(query, caches, batch, rule, result, workspace, config)
        if workspace is not None:
            reduce_every_token(workspace, batch, rule, result)
        return
    launch_prefill(query, caches, batch, rule, result, _prefill_config(query, caches, batch))
    decode_single_rows(query, caches, batch, rule, result, workspace, config)
    if workspace is not None:
        reduce_single_rows(workspace, batch, rule, result)


def allocate_workspace(query: Tensor, caches: Caches, batch: Batch, rule: Rule) -> Workspace | None:
    """The workspace of such a call; None where no sequence is split."""
    num_items = min(query.shape[0], batch.num_rows)
    positions = batch.num_columns * caches.block_size
    tile = _decode_config(query, caches).tile
    num_splits = choose_num_splits(
        current_target(query.device),
        num_programs=max(1, num_items * caches.num_kv_heads),
        num_tiles=-(-(min(positions, rule.window + tile) if rule.window else positions) // tile),
        head_dim=padded(caches.head_dim_v),
    )
    if num_splits == 1:
        return None
    sizes = (num_items, query.shape[1], num_splits)
    return Workspace(
        out=query.new_empty((*sizes, caches.head_dim_v), dtype=torch.float32),
        lse=query.new_empty(sizes, dtype=torch.float32),
    )


def _decode_config(query: Tensor, caches: Caches) -> TileConfig:
    shape = _tile_shape(caches, query_rows(query.shape[1] // caches.num_kv_heads))
    return decode_config(current_target(query.device), shape)


def _prefill_config(query: Tensor, caches: Caches, batch: Batch) -> TileConfig:
    group = query.shape[1] // caches.num_kv_heads
    average = -(-query.shape[0] // max(1, batch.num_rows)) * group
    return prefill_config(current_target(query.device), _tile_shape(caches, query_rows(group)), average)


def _tile_shape(caches: Caches, rows: int) -> TileShape:
    widest = padded(max(caches.head_dim_k, caches.head_dim_v))
    return TileShape(head_dim=widest, element_bytes=caches.key.element_size(), rows=rows)
