"""Which kernels a batch needs: decided from shapes alone, so that a CUDA graph can be captured."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pykv.kernels.arguments import Batch, Caches, Result, Rule, Workspace, padded, query_rows
from pykv.kernels.decode import decode_every_token, decode_single_rows
from pykv.kernels.decode_reduce import reduce_every_token, reduce_single_rows
from pykv.kernels.find_prefixes import FEWEST_SHARED, find_prefixes
from pykv.kernels.prefill import launch_prefill
from pykv.kernels.shared_prefix import launch_shared_prefix
from pykv.kernels.splits import choose_num_splits
from pykv.kernels.target import Target, current_target
from pykv.kernels.tile_config import TileConfig, TileShape, decode_config, prefill_config, prefix_config

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
    by_row = query.shape[0] > batch.num_rows
    if by_row:
        launch_prefill(query, caches, batch, rule, result, _prefill_config(query, caches, batch))
    if workspace is not None and workspace.prefixes is not None:
        find_prefixes(workspace.prefixes, batch, rule, caches.block_size, config.tile)
        prefix_config = _prefix_config(query, caches)
        launch_shared_prefix(query, caches, batch, rule, workspace, prefix_config, by_row=by_row)
    decode, reduce = (
        (decode_single_rows, reduce_single_rows) if by_row else (decode_every_token, reduce_every_token)
    )
    decode(query, caches, batch, rule, result, workspace, config)
    if workspace is not None:
        reduce(workspace, batch, rule, result)


def allocate_workspace(
    query: Tensor, caches: Caches, batch: Batch, rule: Rule, *, share_prefixes: bool = False
) -> Workspace | None:
    """The workspace of such a call; None where no sequence is split and none can share.

    Args:
        share_prefixes: whether decodes whose tables begin with the same blocks read these together. It takes two more
            launches, which is why the caller says where it may pay.
    """
    num_items = min(query.shape[0], batch.num_rows)
    num_splits, num_prefix_splits = part_counts(
        query.device,
        _element_bytes(query, caches),
        (num_items, batch.num_rows, batch.num_columns * caches.block_size, rule.window),
        (query.shape[1], caches.num_kv_heads, caches.head_dim_k, caches.head_dim_v),
        share_prefixes,
    )
    if num_splits + num_prefix_splits == 1:
        return None
    sizes = (num_items, query.shape[1], num_splits + num_prefix_splits)
    shares = num_prefix_splits > 0
    return Workspace(
        out=query.new_empty((*sizes, caches.head_dim_v), dtype=torch.float32),
        lse=query.new_empty(sizes, dtype=torch.float32),
        prefixes=query.new_empty((3, batch.num_rows), dtype=torch.int32) if shares else None,
        num_prefix_splits=num_prefix_splits,
    )


@torch.compiler.assume_constant_result
def part_counts(
    device: torch.device,
    element_bytes: int,
    batch: tuple[int, int, int, int],
    heads: tuple[int, int, int, int],
    share_prefixes: bool,
) -> tuple[int, int]:
    """Into how many parts a decode cuts what a sequence reads alone, and what it reads with others (0: it does not).

    Of plain numbers, so that a compiled graph holds the result as a constant.

    Args:
        batch: tokens that are taken one by one, rows, positions of a table row, window (0: none).
        heads: query heads, KV heads, their sizes of keys and of values.
    """
    return _part_counts(current_target(device), element_bytes, batch, heads, share_prefixes)


@functools.lru_cache(maxsize=1024)
def _part_counts(
    target: Target,
    element_bytes: int,
    batch: tuple[int, int, int, int],
    heads: tuple[int, int, int, int],
    share_prefixes: bool,
) -> tuple[int, int]:
    num_items, num_rows, positions, window = batch
    num_heads, num_kv_heads, head_dim_k, head_dim_v = heads
    rows = query_rows(num_heads // num_kv_heads)
    shape = TileShape(padded(max(head_dim_k, head_dim_v)), element_bytes, rows)
    tile = decode_config(target, shape).tile
    seen = min(positions, window) if window else positions
    shares = share_prefixes and min(num_rows, num_items) > 1 and seen >= FEWEST_SHARED

    def splits(num_programs: int) -> int:
        return choose_num_splits(
            target,
            num_programs=max(1, num_programs * num_kv_heads),
            num_tiles=-(-(min(positions, window + tile) if window else positions) // tile),
            head_dim=padded(head_dim_v) * (2 if shares else 1),  # the reduction holds both kinds of parts
        )

    if not shares:
        return splits(num_items), 0
    return splits(num_items), splits(-(-num_rows * rows // prefix_config(target, shape).rows))


def _decode_config(query: Tensor, caches: Caches) -> TileConfig:
    shape = _tile_shape(query, caches, query_rows(query.shape[1] // caches.num_kv_heads))
    return decode_config(current_target(query.device), shape)


def _prefill_config(query: Tensor, caches: Caches, batch: Batch) -> TileConfig:
    group = query.shape[1] // caches.num_kv_heads
    average = -(-query.shape[0] // max(1, batch.num_rows)) * group
    return prefill_config(
        current_target(query.device), _tile_shape(query, caches, query_rows(group)), average
    )


def _prefix_config(query: Tensor, caches: Caches) -> TileConfig:
    shape = _tile_shape(query, caches, query_rows(query.shape[1] // caches.num_kv_heads))
    return prefix_config(current_target(query.device), shape)


def _tile_shape(query: Tensor, caches: Caches, rows: int) -> TileShape:
    widest = padded(max(caches.head_dim_k, caches.head_dim_v))
    return TileShape(head_dim=widest, element_bytes=_element_bytes(query, caches), rows=rows)


def _element_bytes(query: Tensor, caches: Caches) -> int:
    """Of a cache's element; beside float32 queries those of 8 bits are multiplied as float32, and count as such."""
    return 4 if query.dtype is torch.float32 else caches.key.element_size()
