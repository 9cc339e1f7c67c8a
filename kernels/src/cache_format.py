"""How a cache stores its numbers, as the codes that the kernels are specialised by."""

from __future__ import annotations

from enum import IntEnum

import torch
import triton.language as tl

from pykv.kernels.target import Target

__all__ = [
    "E4M3_NATIVE",
    "E4M3_SOFTWARE",
    "INT8",
    "SAME",
    "CacheFormat",
    "as_read",
    "as_written",
    "cache_format",
]


class CacheFormat(IntEnum):
    """What a cache's elements are.

    SAME: the type of the queries (float32, float16, bfloat16); no scales.
    INT8: symmetric int8, one float32 scale a token and head.
    E4M3_SOFTWARE: fp8 e4m3 with such scales, encoded and decoded by integer operations: runs on every target.
    E4M3_NATIVE: the same bytes, converted by the hardware (NVIDIA from sm_89).
    """

    SAME = 0
    INT8 = 1
    E4M3_SOFTWARE = 2
    E4M3_NATIVE = 3


# The same codes as kernels may name them.
SAME = tl.constexpr(int(CacheFormat.SAME))
INT8 = tl.constexpr(int(CacheFormat.INT8))
E4M3_SOFTWARE = tl.constexpr(int(CacheFormat.E4M3_SOFTWARE))
E4M3_NATIVE = tl.constexpr(int(CacheFormat.E4M3_NATIVE))


def cache_format(cache: torch.Tensor, target: Target) -> CacheFormat:
    """The code of a cache of this dtype on this target."""
    if cache.dtype == torch.int8:
        return CacheFormat.INT8
    if cache.dtype == torch.float8_e4m3fn:
        return CacheFormat.E4M3_NATIVE if target.native_e4m3 else CacheFormat.E4M3_SOFTWARE
    return CacheFormat.SAME


def as_written(cache: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """The cache as kernels store into it: bytes where they encode themselves."""
    return cache.view(torch.uint8) if form is CacheFormat.E4M3_SOFTWARE else cache


def as_read(cache: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """The cache as the attention kernels read it: four codes a word where they decode themselves.

    Raises:
        ValueError: the codes cannot be read four at a time.
    """
    if form not in (CacheFormat.INT8, CacheFormat.E4M3_SOFTWARE):
        return cache
    if cache.shape[-1] % 4 or cache.storage_offset() % 4 or any(stride % 4 for stride in cache.stride()[:-1]):
        raise ValueError(
            f"a cache of {cache.dtype} has head size {cache.shape[-1]}, strides {cache.stride()} and offset "
            f"{cache.storage_offset()}; the triton backend needs multiples of 4"
        )
    return cache.view(torch.uint32)
