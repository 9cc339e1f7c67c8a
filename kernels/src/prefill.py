"""Prefill: causal attention of chunks of new tokens; a grid of (query block, KV head).

A program holds a block of one row's tokens, each with all the query heads of the KV head. The blocks of all rows have
numbers that follow from `query_starts` alone, so the grid is an upper bound that the host knows without asking: a
program whose number no row uses returns at once. The last rows come first, because late blocks see the most keys.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.addressing import blocks_of_tile, last_row_from
from pykv.kernels.arguments import Batch, Caches, Result, Rule, arithmetic_type, padded
from pykv.kernels.scores import load_query
from pykv.kernels.softmax import LN2, LOG2E, add_sink, empty_sums, finish, log_sum_exp, normalize
from pykv.kernels.target import current_target
from pykv.kernels.tile_config import TileConfig
from pykv.kernels.tile_loop import attend_tiles
from pykv.kernels.triton_types import precision, triton_type

__all__ = ["launch_prefill"]


def launch_prefill(
    query: Tensor, caches: Caches, batch: Batch, rule: Rule, result: Result, config: TileConfig
) -> None:
    """Attends with the tokens of all rows but those of exactly one token, whose results are left alone.

    Tokens of no row and of empty rows become zeros.
    """
    num_tokens, num_heads = query.shape[:2]
    target = current_target(query.device)
    form = caches.format(target)
    key_cache, value_cache = caches.as_read(form)
    group = num_heads // caches.num_kv_heads
    arithmetic = arithmetic_type(query, form)
    tokens = config.rows // group
    prefill_kernel[num_tokens // tokens + batch.num_rows + 1, caches.num_kv_heads](
        result.out,
        result.lse,
        query,
        key_cache,
        value_cache,
        caches.scales,
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        batch.table_rows,
        rule.sinks,
        num_tokens,
        batch.num_rows,
        batch.num_columns,
        rule.scale,
        rule.softcap,
        rule.window,
        *query.stride()[:2],
        *result.out.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *caches.scale_strides(),
        batch.block_tables.stride(0),
        GROUP=group,
        TOKENS=tokens,
        ROWS=config.rows,
        HEAD_DIM_K=caches.head_dim_k,
        HEAD_DIM_V=caches.head_dim_v,
        PADDED_K=padded(caches.head_dim_k),
        PADDED_V=padded(caches.head_dim_v),
        BLOCK_SIZE=caches.block_size,
        TILE=config.tile,
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


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def prefill_kernel(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, scales_ptr,
    block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, sinks_ptr,
    num_tokens, num_rows, num_columns, scale, softcap, window,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head,
    key_stride_block, key_stride_head, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot,
    scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
    table_stride,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    # Row num_rows stands for the tokens after the last row's: it has no keys.
    row = last_row_from(query_starts_ptr, number, num_rows, TOKENS)
    exists = row < num_rows
    row_begin = tl.load(query_starts_ptr + row)
    row_end = tl.load(query_starts_ptr + row + 1, mask=exists, other=num_tokens)
    count = row_end - row_begin
    first = (number - row_begin // TOKENS - row) * TOKENS
    if (first >= count) | (exists & (count == 1)):
        return
    seq_len = tl.load(seq_lens_ptr + row, mask=exists, other=0)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row, mask=exists, other=0)

    lane = tl.arange(0, ROWS)
    query_index = first + lane // GROUP
    query_head = head * GROUP + lane % GROUP
    is_query = (lane < TOKENS * GROUP) & (query_index < count)
    token = (row_begin + query_index).to(tl.int64)
    query_rows = token * query_stride_token + query_head * query_stride_head
    query, query_odd, factor = load_query(
        query_ptr, query_rows, is_query, scale, FORMAT, HAS_CAP, DTYPE, HEAD_DIM_K, PADDED_K
    )

    # The block's first query is at `origin`; together its queries see the keys [begin, end), each the ones up to its
    # own position; every one of them sees all of the tiles before `whole`.
    origin = seq_len - count + first
    query_position = seq_len - count + query_index
    seen_begin = query_position - window + 1 if HAS_WINDOW else None
    begin = tl.maximum(origin - window + 1, 0) if HAS_WINDOW else 0
    end = tl.minimum(tl.minimum(origin + TOKENS, seq_len), num_columns * BLOCK_SIZE)
    seen_end = tl.minimum(query_position + 1, end)
    first_tile = begin // TILE
    whole = first_tile if HAS_WINDOW else tl.maximum(tl.minimum(origin + 1, end), 0) // TILE

    table_ptr = block_tables_ptr + table_row.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    sums, sums_odd = empty_sums(FORMAT, ROWS, PADDED_V)
    blocks = blocks_of_tile(table_ptr, first_tile, begin, end, BLOCK_SIZE, TILE)
    if not HAS_WINDOW:
        blocks, maximum, denominator, sums, sums_odd = attend_tiles(
            first_tile, whole, begin, end, None, None, blocks, table_ptr, head,
            query, query_odd, factor, softcap, key_ptr, value_ptr, scales_ptr,
            key_stride_block, key_stride_head, key_stride_slot,
            value_stride_block, value_stride_head, value_stride_slot,
            scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
            maximum, denominator, sums, sums_odd, HEAD_DIM_K, HEAD_DIM_V, PADDED_K, PADDED_V,
            BLOCK_SIZE, TILE, HAS_CAP, FORMAT, DTYPE, PRECISION, SAME_STRIDES, ALL_SEEN=True, HAS_BEGIN=False,
        )  # fmt: skip
    _, maximum, denominator, sums, sums_odd = attend_tiles(
        whole, tl.cdiv(end, TILE), begin, end, seen_begin, seen_end, blocks, table_ptr, head,
        query, query_odd, factor, softcap, key_ptr, value_ptr, scales_ptr,
        key_stride_block, key_stride_head, key_stride_slot,
        value_stride_block, value_stride_head, value_stride_slot,
        scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
        maximum, denominator, sums, sums_odd, HEAD_DIM_K, HEAD_DIM_V, PADDED_K, PADDED_V,
        BLOCK_SIZE, TILE, HAS_CAP, FORMAT, DTYPE, PRECISION, SAME_STRIDES, ALL_SEEN=False, HAS_BEGIN=HAS_WINDOW,
    )  # fmt: skip
    accumulator = finish(sums, sums_odd, FORMAT, ROWS, PADDED_V)

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head, mask=is_query, other=0.0) * LOG2E
        maximum, denominator, accumulator = add_sink(sink, maximum, denominator, accumulator)
    out_rows = token * out_stride_token + query_head * out_stride_head
    out = normalize(denominator, accumulator).to(out_ptr.dtype.element_ty)
    column = tl.arange(0, PADDED_V)
    stored = is_query[:, None] & (column < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + out_rows[:, None] + column[None, :], out, mask=stored)
    if lse_ptr is not None:
        lse_rows = token * (tl.num_programs(1) * GROUP) + query_head
        tl.store(lse_ptr + lse_rows, log_sum_exp(maximum, denominator) * LN2, mask=is_query)
