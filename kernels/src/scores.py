"""Device functions that load queries and keys and make scores of them in base 2, whatever the cache's format is."""
# mypy: allow-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.addressing import load_columns, load_rows
from pykv.kernels.cache_format import E4M3_NATIVE, E4M3_SOFTWARE, SAME
from pykv.kernels.eight_bit import E4M3_SOFTWARE_UNIT, decode_halves
from pykv.kernels.softmax import LOG2E, cap_scores

__all__ = ["load_cache_rows", "load_query", "load_scales", "tile_scores"]


@triton.jit
def scale_unit(FORMAT: tl.constexpr):
    """What the cache's scales must be multiplied by, because the decoder left it out."""
    if FORMAT == E4M3_SOFTWARE:
        return E4M3_SOFTWARE_UNIT
    else:
        return 1.0


@triton.jit
def load_cache_rows(
    cache_ptr, row_offsets, live, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """One row of a cache for each offset, as it is stored: elements, or words of four codes."""
    if FORMAT == SAME or FORMAT == E4M3_NATIVE:
        return load_rows(cache_ptr, row_offsets, live, WIDTH, PADDED)
    else:
        return load_rows(cache_ptr, row_offsets, live, WIDTH // 4, PADDED // 4)


@triton.jit
def load_scales(scales_ptr, slots, kind_stride, live, FORMAT: tl.constexpr):
    """The scales of a tile's keys and of its values, the latter with the decoder's unit; unused without scales."""
    if FORMAT == SAME:
        return 0.0, 0.0
    else:
        key_scales = tl.load(scales_ptr + slots, mask=live, other=0.0)
        value_scales = tl.load(scales_ptr + kind_stride + slots, mask=live, other=0.0)
        return key_scales, value_scales * scale_unit(FORMAT)


@triton.jit
def load_query(
    query_ptr, row_offsets, live, scale,
    FORMAT: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The queries in two parts, and the factor (a scalar, or one a row) that their scores still need.

    For 8-bit caches the parts are the even and the odd columns, to match `decode_halves`; they are multiplied in DTYPE
    (float16), so each row is brought into [-1, 1] first, that no query overflows it. Otherwise the second part is
    unused. log2(e) is in the factor unless a soft cap comes between.
    """
    factor = scale if HAS_CAP else scale * LOG2E
    if FORMAT == SAME:
        return load_rows(query_ptr, row_offsets, live, WIDTH, PADDED), 0, factor
    else:
        column = 2 * tl.arange(0, PADDED // 2)
        even = load_columns(query_ptr, row_offsets, live, column, WIDTH, WIDTH == PADDED).to(tl.float32)
        odd = load_columns(query_ptr, row_offsets, live, column + 1, WIDTH, WIDTH == PADDED).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        largest = tl.where(largest > 0, largest, 1.0)[:, None]
        return (even / largest).to(DTYPE), (odd / largest).to(DTYPE), largest * (factor * scale_unit(FORMAT))


@triton.jit
def tile_scores(
    first_query, second_query, factor, keys, key_scales, softcap,
    FORMAT: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """[rows, TILE]: queries times keys, scaled, capped, in base 2; nothing is masked yet."""
    if FORMAT == SAME:
        scores = tl.dot(first_query, tl.trans(keys), input_precision=PRECISION) * factor
    else:
        even, odd = decode_halves(keys, FORMAT, DTYPE, TILE, PADDED)
        scores = tl.dot(first_query, tl.trans(even), input_precision=PRECISION)
        scores = tl.dot(second_query, tl.trans(odd), acc=scores, input_precision=PRECISION)
        scores = scores * factor * key_scales[None, :]
    if HAS_CAP:
        scores = cap_scores(scores, softcap)
    return scores
