"""Decode: attention of single tokens; a grid of (token, KV head, split), each split a part of the keys.

The query heads of a KV head share its program, so that every key and value is read once. A split that has no keys
leaves -inf and returns; `decode_reduce` merges the splits. What several tokens share, `shared_prefix` reads for them.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, SIM102

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.addressing import blocks_of_tile, keys_of_token, row_of_token
from pykv.kernels.arguments import Batch, Caches, Result, Rule, Workspace, arithmetic_type, padded
from pykv.kernels.scores import load_query
from pykv.kernels.softmax import LN2, LOG2E, add_sink, empty_sums, finish, log_sum_exp, normalize
from pykv.kernels.target import current_target
from pykv.kernels.tile_config import TileConfig
from pykv.kernels.tile_loop import attend_tiles
from pykv.kernels.triton_types import precision, triton_type

__all__ = ["decode_every_token", "decode_single_rows"]


def decode_every_token(
    query: Tensor,
    caches: Caches,
    batch: Batch,
    rule: Rule,
    result: Result,
    workspace: Workspace | None,
    config: TileConfig,
) -> None:
    """Attends with each token of the batch by itself: right for every batch, fast where rows have one token.

    Without a workspace each program reads all of its token's keys and fills the result itself; with one the result is
    left to `decode_reduce`, and the workspace has an item a token.
    """
    _launch(query, caches, batch, rule, result, workspace, config, by_row=False)


def decode_single_rows(
    query: Tensor,
    caches: Caches,
    batch: Batch,
    rule: Rule,
    result: Result,
    workspace: Workspace | None,
    config: TileConfig,
) -> None:
    """Attends with the tokens of those batch rows that have exactly one; other tokens' results are left alone.

    The workspace, if any, has an item a batch row.
    """
    _launch(query, caches, batch, rule, result, workspace, config, by_row=True)


def _launch(
    query: Tensor,
    caches: Caches,
    batch: Batch,
    rule: Rule,
    result: Result,
    workspace: Workspace | None,
    config: TileConfig,
    *,
    by_row: bool,
) -> None:
    num_items = batch.num_rows if by_row else query.shape[0]
    num_splits = 1 if workspace is None else workspace.num_splits
    num_parts = 1 if workspace is None else workspace.num_parts
    target = current_target(query.device)
    form = caches.format(target)
    key_cache, value_cache = caches.as_read(form)
    group = query.shape[1] // caches.num_kv_heads
    arithmetic = arithmetic_type(query, form)
    decode_kernel[num_items, caches.num_kv_heads, num_splits](
        result.out,
        result.lse,
        None if workspace is None else workspace.out,
        None if workspace is None else workspace.lse,
        None if workspace is None else workspace.shared_lengths,
        query,
        key_cache,
        value_cache,
        caches.scales,
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        batch.table_rows,
        rule.sinks,
        batch.num_rows,
        batch.num_columns,
        rule.scale,
        rule.softcap,
        rule.window,
        num_splits,
        num_parts,
        *query.stride()[:2],
        *result.out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *caches.scale_strides(),
        batch.block_tables.stride(0),
        BY_ROW=by_row,
        GROUP=group,
        ROWS=config.rows,
        HEAD_DIM_K=caches.head_dim_k,
        HEAD_DIM_V=caches.head_dim_v,
        PADDED_K=padded(caches.head_dim_k),
        PADDED_V=padded(caches.head_dim_v),
        BLOCK_SIZE=caches.block_size,
        TILE=config.tile,
        IS_WHOLE=num_parts == 1,
        HAS_WINDOW=rule.window > 0,
        HAS_CAP=rule.softcap > 0,
        FORMAT=int(form),
        DTYPE=triton_type(arithmetic),
        PRECISION=precision(arithmetic, target),
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        enable_fp_fusion=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(  # what varies from step to step may not compile it anew
    do_not_specialize=["num_rows", "num_splits", "num_parts"],
    do_not_specialize_on_alignment=["shared_lengths_ptr"],
)
def decode_kernel(
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, shared_lengths_ptr,
    query_ptr, key_ptr, value_ptr, scales_ptr,
    block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, sinks_ptr,
    num_rows, num_columns, scale, softcap, window, num_splits, num_parts,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head,
    key_stride_block, key_stride_head, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot,
    scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
    table_stride,
    BY_ROW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if BY_ROW:
        row = item
        token = tl.load(query_starts_ptr + row)
        if tl.load(query_starts_ptr + row + 1) - token != 1:
            return
    else:
        token = item
        row = row_of_token(query_starts_ptr, token, num_rows)
    length, table_row = keys_of_token(
        query_starts_ptr, seq_lens_ptr, table_rows_ptr, row, token, num_rows, num_columns * BLOCK_SIZE
    )

    # [begin, length) is what the token sees and nobody reads for it; whole tiles of it are dealt out to the splits.
    begin = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    if shared_lengths_ptr is not None:
        shared = tl.load(shared_lengths_ptr + row, mask=row < num_rows, other=0)
        begin = tl.maximum(begin, shared)
    first_tile = begin // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    share = tl.cdiv(num_tiles, num_splits)
    split_begin = first_tile + split * share
    split_end = first_tile + tl.minimum((split + 1) * share, num_tiles)

    member = tl.arange(0, ROWS)
    query_head = head * GROUP + member
    is_head = member < GROUP
    query_rows = token.to(tl.int64) * query_stride_token + query_head * query_stride_head
    query, query_odd, factor = load_query(
        query_ptr, query_rows, is_head, scale, FORMAT, HAS_CAP, DTYPE, HEAD_DIM_K, PADDED_K
    )

    table_ptr = block_tables_ptr + table_row.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    first, second = empty_sums(FORMAT, ROWS, PADDED_V)
    blocks = blocks_of_tile(table_ptr, split_begin, begin, length, BLOCK_SIZE, TILE)
    _, maximum, denominator, first, second = attend_tiles(
        split_begin, split_end, begin, length, None, None, blocks, table_ptr, head,
        query, query_odd, factor, softcap, key_ptr, value_ptr, scales_ptr,
        key_stride_block, key_stride_head, key_stride_slot,
        value_stride_block, value_stride_head, value_stride_slot,
        scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
        maximum, denominator, first, second, HEAD_DIM_K, HEAD_DIM_V, PADDED_K, PADDED_V,
        BLOCK_SIZE, TILE, HAS_CAP, FORMAT, DTYPE, PRECISION, SAME_STRIDES, ALL_SEEN=False, HAS_BEGIN=HAS_WINDOW,
    )  # fmt: skip
    accumulator = finish(first, second, FORMAT, ROWS, PADDED_V)

    column = tl.arange(0, PADDED_V)
    stored = is_head[:, None] & (column < HEAD_DIM_V)[None, :]
    num_heads = tl.num_programs(1) * GROUP
    if IS_WHOLE:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + query_head, mask=is_head, other=0.0) * LOG2E
            maximum, denominator, accumulator = add_sink(sink, maximum, denominator, accumulator)
        out_rows = token.to(tl.int64) * out_stride_token + query_head * out_stride_head
        out = normalize(denominator, accumulator).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + column[None, :], out, mask=stored)
        if lse_ptr is not None:
            lse_row = token.to(tl.int64) * num_heads + query_head
            tl.store(lse_ptr + lse_row, log_sum_exp(maximum, denominator) * LN2, mask=is_head)
    else:
        first_part = (item.to(tl.int64) * num_heads + query_head) * num_parts
        part = first_part + split
        tl.store(partial_lse_ptr + part, log_sum_exp(maximum, denominator), mask=is_head)
        if split_begin < split_end:
            out = normalize(denominator, accumulator)
            tl.store(partial_out_ptr + part[:, None] * HEAD_DIM_V + column[None, :], out, mask=stored)
        if shared_lengths_ptr is not None:
            if (shared == 0) & (split == 0):  # no program reads a prefix for this token
                for prefix_part in range(num_splits, num_parts):
                    tl.store(partial_lse_ptr + first_part + prefix_part, float("-inf"), mask=is_head)
