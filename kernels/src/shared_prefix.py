"""Reads what decodes share once for all of them; a grid of (place in the sorted rows, KV head, split).

A program holds several members of a family (see `find_prefixes`), each with all the query heads of the KV head, and
walks the first one's table as far as the longest of them shares. Its results are further parts of the decode.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.addressing import blocks_of_tile
from pykv.kernels.arguments import Batch, Caches, Rule, Workspace, arithmetic_type, padded
from pykv.kernels.scores import load_query
from pykv.kernels.softmax import empty_sums, finish, log_sum_exp, normalize
from pykv.kernels.target import current_target
from pykv.kernels.tile_config import TileConfig
from pykv.kernels.tile_loop import attend_tiles
from pykv.kernels.triton_types import precision, triton_type

__all__ = ["launch_shared_prefix"]


def launch_shared_prefix(
    query: Tensor,
    caches: Caches,
    batch: Batch,
    rule: Rule,
    workspace: Workspace,
    config: TileConfig,
    *,
    by_row: bool,
) -> None:
    """Fills the workspace's last parts of all rows that share.

    Args:
        workspace: its `prefixes` are filled.
        by_row: whether the workspace has an item a batch row, or one a token.
    """
    target = current_target(query.device)
    form = caches.format(target)
    key_cache, value_cache = caches.as_read(form)
    group = query.shape[1] // caches.num_kv_heads
    arithmetic = arithmetic_type(query, form)
    shared_prefix_kernel[batch.num_rows, caches.num_kv_heads, workspace.num_prefix_splits](
        workspace.out,
        workspace.lse,
        workspace.prefixes,
        query,
        key_cache,
        value_cache,
        caches.scales,
        batch.block_tables,
        batch.query_starts,
        batch.table_rows,
        batch.num_rows,
        rule.scale,
        rule.softcap,
        workspace.num_prefix_splits,
        workspace.num_parts,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *caches.scale_strides(),
        batch.block_tables.stride(0),
        BY_ROW=by_row,
        GROUP=group,
        MEMBERS=config.rows // group,
        ROWS=config.rows,
        HEAD_DIM_K=caches.head_dim_k,
        HEAD_DIM_V=caches.head_dim_v,
        PADDED_K=padded(caches.head_dim_k),
        PADDED_V=padded(caches.head_dim_v),
        BLOCK_SIZE=caches.block_size,
        TILE=config.tile,
        HAS_CAP=rule.softcap > 0,
        FORMAT=int(form),
        DTYPE=triton_type(arithmetic),
        PRECISION=precision(arithmetic, target),
        SAME_STRIDES=key_cache.stride() == value_cache.stride(),
        enable_fp_fusion=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_parts"])
def shared_prefix_kernel(
    partial_out_ptr, partial_lse_ptr, prefixes_ptr, query_ptr, key_ptr, value_ptr, scales_ptr,
    block_tables_ptr, query_starts_ptr, table_rows_ptr,
    num_rows, scale, softcap, num_splits, num_parts,
    query_stride_token, query_stride_head,
    key_stride_block, key_stride_head, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot,
    scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
    table_stride,
    BY_ROW: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_CAP: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    rank = tl.load(prefixes_ptr + num_rows + place)
    if rank % MEMBERS != 0:
        return

    # Ranks grow by one inside a family and begin again in the next.
    lane = tl.arange(0, ROWS)
    member = lane // GROUP
    is_member = (lane < MEMBERS * GROUP) & (place + member < num_rows)
    member_rank = tl.load(prefixes_ptr + num_rows + place + member, mask=is_member, other=-1)
    is_member = is_member & (member_rank == rank + member)
    row = tl.load(prefixes_ptr + place + member, mask=is_member, other=0)
    shared = tl.load(prefixes_ptr + 2 * num_rows + row, mask=is_member, other=0)
    is_member = is_member & (shared > 0)
    end = tl.max(shared, 0)
    if end == 0:
        return
    num_tiles = tl.cdiv(end, TILE)
    share = tl.cdiv(num_tiles, num_splits)
    split_begin = split * share
    split_end = tl.minimum((split + 1) * share, num_tiles)

    token = tl.load(query_starts_ptr + row, mask=is_member, other=0).to(tl.int64)
    query_head = head * GROUP + lane % GROUP
    query_rows = token * query_stride_token + query_head * query_stride_head
    query, query_odd, factor = load_query(
        query_ptr, query_rows, is_member, scale, FORMAT, HAS_CAP, DTYPE, HEAD_DIM_K, PADDED_K
    )

    first_row = tl.load(prefixes_ptr + place - rank)
    table_row = first_row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + first_row)
    table_ptr = block_tables_ptr + table_row.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    first, second = empty_sums(FORMAT, ROWS, PADDED_V)
    blocks = blocks_of_tile(table_ptr, split_begin, 0, end, BLOCK_SIZE, TILE)
    _, maximum, denominator, first, second = attend_tiles(
        split_begin, split_end, 0, end, None, shared, blocks, table_ptr, head,
        query, query_odd, factor, softcap, key_ptr, value_ptr, scales_ptr,
        key_stride_block, key_stride_head, key_stride_slot,
        value_stride_block, value_stride_head, value_stride_slot,
        scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
        maximum, denominator, first, second, HEAD_DIM_K, HEAD_DIM_V, PADDED_K, PADDED_V,
        BLOCK_SIZE, TILE, HAS_CAP, FORMAT, DTYPE, PRECISION, SAME_STRIDES, ALL_SEEN=False, HAS_BEGIN=False,
    )  # fmt: skip
    accumulator = finish(first, second, FORMAT, ROWS, PADDED_V)

    num_heads = tl.num_programs(1) * GROUP
    item = row.to(tl.int64) if BY_ROW else token
    part = (item * num_heads + query_head) * num_parts + (num_parts - num_splits) + split
    tl.store(partial_lse_ptr + part, log_sum_exp(maximum, denominator), mask=is_member)
    if split_begin < split_end:
        out = normalize(denominator, accumulator)
        column = tl.arange(0, PADDED_V)
        stored = is_member[:, None] & (column < HEAD_DIM_V)[None, :]
        tl.store(partial_out_ptr + part[:, None] * HEAD_DIM_V + column[None, :], out, mask=stored)
