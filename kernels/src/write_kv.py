"""Scatters one step's keys and values into the paged cache; a grid of (tokens, KV head)."""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.addressing import load_rows
from pykv.kernels.arguments import Caches, padded
from pykv.kernels.cache_format import SAME
from pykv.kernels.eight_bit import encode, quotient, row_scales
from pykv.kernels.target import current_target

__all__ = ["launch_write_kv"]

_ELEMENTS = 4096  # of one program's tile


def launch_write_kv(key: Tensor, value: Tensor, caches: Caches, slot_mapping: Tensor) -> None:
    """Writes every token's K and V, and for 8-bit caches the scale of each, to its slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim_k or _v], last dimension contiguous.
        caches: changed in place.
        slot_mapping: int64 [num_tokens], contiguous; slots outside the cache, -1 among them, are skipped.
    """
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    form = caches.format(current_target(key.device))
    key_cache, value_cache = caches.as_written(form)
    widest = padded(max(caches.head_dim_k, caches.head_dim_v))
    tokens = max(1, min(triton.next_power_of_2(num_tokens), _ELEMENTS // widest))
    write_kv_kernel[triton.cdiv(num_tokens, tokens), caches.num_kv_heads](
        key,
        value,
        key_cache,
        value_cache,
        caches.scales,
        slot_mapping,
        num_tokens,
        key_cache.shape[0] * caches.block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *caches.scale_strides(),
        HEAD_DIM_K=caches.head_dim_k,
        HEAD_DIM_V=caches.head_dim_v,
        PADDED_K=padded(caches.head_dim_k),
        PADDED_V=padded(caches.head_dim_v),
        BLOCK_SIZE=caches.block_size,
        TOKENS=tokens,
        FORMAT=int(form),
        enable_fp_fusion=True,
        num_warps=4,
    )


@triton.jit
def _write_rows(
    source_ptr, cache_ptr, scales_ptr, source_rows, cache_rows, scale_slots, live,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Moves one kind (keys, or values) of a tile of tokens."""
    rows = load_rows(source_ptr, source_rows, live, WIDTH, PADDED)
    if FORMAT != SAME:
        rows = rows.to(tl.float32)
        scales = row_scales(rows, FORMAT)
        tl.store(scales_ptr + scale_slots, scales, mask=live)
        rows = encode(quotient(rows, scales[:, None]), FORMAT, cache_ptr.dtype.element_ty)
    column = tl.arange(0, PADDED)
    mask = live[:, None] & (column < WIDTH)[None, :]
    tl.store(cache_ptr + cache_rows[:, None] + column[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, slots_ptr, num_tokens, num_slots,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    key_cache_stride_block, key_cache_stride_head, key_cache_stride_slot,
    value_cache_stride_block, value_cache_stride_head, value_cache_stride_slot,
    scales_stride_block, scales_stride_kind, scales_stride_head, scales_stride_slot,
    HEAD_DIM_K: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    token = token.to(tl.int64)
    scale_slots = block * scales_stride_block + head * scales_stride_head + offset * scales_stride_slot
    key_rows = block * key_cache_stride_block + head * key_cache_stride_head + offset * key_cache_stride_slot
    _write_rows(
        key_ptr, key_cache_ptr, scales_ptr, token * key_stride_token + head * key_stride_head,
        key_rows, scale_slots, live, HEAD_DIM_K, PADDED_K, FORMAT,
    )  # fmt: skip
    value_rows = (
        block * value_cache_stride_block + head * value_cache_stride_head + offset * value_cache_stride_slot
    )
    _write_rows(
        value_ptr, value_cache_ptr, scales_ptr, token * value_stride_token + head * value_stride_head,
        value_rows, scale_slots + scales_stride_kind, live, HEAD_DIM_V, PADDED_V, FORMAT,
    )  # fmt: skip
