"""Device function that walks tiles of keys and values: the loop of every attention kernel."""
# mypy: allow-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.addressing import blocks_of_tile, offsets_of_tile
from pykv.kernels.cache_format import SAME
from pykv.kernels.scores import load_cache_rows, load_scales, tile_scores
from pykv.kernels.softmax import accumulate

__all__ = ["attend_tiles"]


@triton.jit
def attend_tiles(
    tile_begin, tile_end, begin, end, seen_begin, seen_end, blocks, table_ptr, head,
    query, query_odd, factor, softcap,
    key_ptr, value_ptr, scales_ptr,
    key_stride_block, key_stride_head, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot,
    scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
    maximum, denominator, first, second,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_CAP: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr,
    ALL_SEEN: tl.constexpr, HAS_BEGIN: tl.constexpr,
):  # fmt: skip
    """Adds the keys and values of the tiles [tile_begin, tile_end) to a streaming softmax.

    The table is read a step ahead: a load whose address another load of the same step gives would halve the depth of
    Triton's pipeline.

    Args:
        begin, end: the positions [begin, end) are read; `begin` may lie inside a tile only with HAS_BEGIN.
        seen_begin, seen_end: [rows], the positions that each query sees, none but those that are read; None: all.
        blocks: the block ids of tile `tile_begin`, from `blocks_of_tile`.
        maximum, denominator, first, second: the sums so far, as `accumulate` takes them.
        ALL_SEEN: every query sees every position of these tiles, so that nothing is masked.

    Returns:
        The block ids of tile `tile_end`, and the sums.
    """
    key_ptr += head.to(tl.int64) * key_stride_head
    value_ptr += head.to(tl.int64) * value_stride_head
    if FORMAT != SAME:
        scales_ptr += head.to(tl.int64) * scales_stride_head
    for tile in range(tile_begin, tile_end):
        block = blocks.to(tl.int64)
        blocks = blocks_of_tile(table_ptr, tile + 1, begin, end, BLOCK_SIZE, TILE)
        offset = offsets_of_tile(tile, BLOCK_SIZE, TILE)
        position = tile * TILE + tl.arange(0, TILE)
        live = tl.full([TILE], True, tl.int1) if ALL_SEEN else position < end
        if HAS_BEGIN:
            live = live & (position >= begin)
        key_rows = block * key_stride_block + offset * key_stride_slot
        value_rows = key_rows if SAME_STRIDES else block * value_stride_block + offset * value_stride_slot
        keys = load_cache_rows(key_ptr, key_rows, live, FORMAT, HEAD_DIM_K, PADDED_K)
        values = load_cache_rows(value_ptr, value_rows, live, FORMAT, HEAD_DIM_V, PADDED_V)
        slots = block * scales_stride_block + offset * scales_stride_slot
        key_scales, value_scales = load_scales(scales_ptr, slots, scales_stride_kind, live, FORMAT)
        scores = tile_scores(
            query, query_odd, factor, keys, key_scales, softcap,
            FORMAT, HAS_CAP, DTYPE, PRECISION, TILE, PADDED_K,
        )  # fmt: skip
        if not ALL_SEEN:
            seen = live[None, :] if seen_end is None else position[None, :] < seen_end[:, None]
            if seen_begin is not None:
                seen = seen & (position[None, :] >= seen_begin[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        maximum, denominator, first, second = accumulate(
            scores, values, value_scales, maximum, denominator, first, second,
            FORMAT, DTYPE, PRECISION, TILE, PADDED_V,
        )  # fmt: skip
    return blocks, maximum, denominator, first, second
