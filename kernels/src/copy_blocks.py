"""Copies whole blocks, within one pool (fork) or between two (swap); a grid of (pair, KV head)."""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.addressing import load_rows
from pykv.kernels.arguments import Caches, padded

__all__ = ["launch_copy_blocks"]

_ELEMENTS = 4096  # of one tile


def launch_copy_blocks(source: Caches, target: Caches, pairs: Tensor) -> None:
    """Copies one layer's blocks, scales included.

    Args:
        source, target: caches of the same shape but for the number of blocks; may be the same, or one of them in
            pinned host memory.
        pairs: int64 [num_pairs, 2], (source block, target block), last dimension contiguous. Targets differ and, in
            one pool, none is a source: the pairs are copied in any order. Pairs with a block outside its pool, -1
            among them, are skipped.
    """
    if pairs.shape[0] == 0:
        return
    widest = padded(max(source.head_dim_k, source.head_dim_v))
    slots = max(1, min(triton.next_power_of_2(source.block_size), _ELEMENTS // widest))
    copy_blocks_kernel[pairs.shape[0], source.num_kv_heads](
        *source.as_moved(),
        source.scales,
        *target.as_moved(),
        target.scales,
        pairs,
        pairs.stride(0),
        source.key.shape[0],
        target.key.shape[0],
        *source.key.stride()[:3],
        *source.value.stride()[:3],
        *source.scale_strides(),
        *target.key.stride()[:3],
        *target.value.stride()[:3],
        *target.scale_strides(),
        HEAD_DIM_K=source.head_dim_k,
        HEAD_DIM_V=source.head_dim_v,
        PADDED_K=padded(source.head_dim_k),
        PADDED_V=padded(source.head_dim_v),
        BLOCK_SIZE=source.block_size,
        SLOTS=slots,
        enable_fp_fusion=True,
        num_warps=4,
    )


@triton.jit
def _copy_rows(
    source_ptr, target_ptr, source_stride, target_stride, slot, live,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Copies the rows `slot` of one block and head."""
    rows = load_rows(source_ptr, slot * source_stride, live, WIDTH, PADDED)
    column = tl.arange(0, PADDED)
    mask = live[:, None] & (column < WIDTH)[None, :]
    tl.store(target_ptr + (slot * target_stride)[:, None] + column[None, :], rows, mask=mask)


@triton.jit
def copy_blocks_kernel(
    source_key_ptr, source_value_ptr, source_scales_ptr, target_key_ptr, target_value_ptr, target_scales_ptr,
    pairs_ptr, pairs_stride, num_source_blocks, num_target_blocks,
    source_key_stride_block, source_key_stride_head, source_key_stride_slot,
    source_value_stride_block, source_value_stride_head, source_value_stride_slot,
    source_scales_stride_block, source_scales_stride_kind, source_scales_stride_head, source_scales_stride_slot,
    target_key_stride_block, target_key_stride_head, target_key_stride_slot,
    target_value_stride_block, target_value_stride_head, target_value_stride_slot,
    target_scales_stride_block, target_scales_stride_kind, target_scales_stride_head, target_scales_stride_slot,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + pair * pairs_stride)
    target = tl.load(pairs_ptr + pair * pairs_stride + 1)
    if (source < 0) | (source >= num_source_blocks) | (target < 0) | (target >= num_target_blocks):
        return
    source_key_ptr += source * source_key_stride_block + head * source_key_stride_head
    source_value_ptr += source * source_value_stride_block + head * source_value_stride_head
    target_key_ptr += target * target_key_stride_block + head * target_key_stride_head
    target_value_ptr += target * target_value_stride_block + head * target_value_stride_head
    for start in range(0, BLOCK_SIZE, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        live = slot < BLOCK_SIZE
        _copy_rows(
            source_key_ptr, target_key_ptr, source_key_stride_slot, target_key_stride_slot, slot, live,
            HEAD_DIM_K, PADDED_K,
        )  # fmt: skip
        _copy_rows(
            source_value_ptr, target_value_ptr, source_value_stride_slot, target_value_stride_slot, slot, live,
            HEAD_DIM_V, PADDED_V,
        )  # fmt: skip
        if source_scales_ptr is not None:
            from_slots = source * source_scales_stride_block + head * source_scales_stride_head
            from_slots += slot * source_scales_stride_slot
            to_slots = target * target_scales_stride_block + head * target_scales_stride_head
            to_slots += slot * target_scales_stride_slot
            key_scales = tl.load(source_scales_ptr + from_slots, mask=live)
            value_scales = tl.load(source_scales_ptr + source_scales_stride_kind + from_slots, mask=live)
            tl.store(target_scales_ptr + to_slots, key_scales, mask=live)
            tl.store(target_scales_ptr + target_scales_stride_kind + to_slots, value_scales, mask=live)
