"""What the numbers of 8-bit caches are multiplied by, and how they come about.

A number is stored as `number / scale`, divided in float32, rounded to the nearest (ties to even) and held inside the
format's range: -127 to 127 for int8, -448 to 448 for float8_e4m3fn. Every backend writes the same bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pykv.attention import checks

KvScales = Tensor | tuple[float, float]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def check_scales(kv_scales: KvScales | None, key_cache: Tensor, query_dtype: torch.dtype) -> None:
    """Raises unless the caches have the query's dtype and no scales, or 8 bits and scales that fit them.

    Raises:
        TypeError, ValueError: see `pykv.attention.paged_attention`.
    """
    if key_cache.dtype not in LARGEST:
        checks.check_tensor("key_cache", key_cache, 4, query_dtype, key_cache.device)
        if kv_scales is not None:
            raise ValueError(f"kv_scales are for 8-bit caches; key_cache has dtype {key_cache.dtype}")
    elif kv_scales is None:
        raise ValueError(f"kv_scales must be given for a cache of {key_cache.dtype}")
    elif isinstance(kv_scales, Tensor):
        _check_token_scales(kv_scales, key_cache)
    else:
        _check_tensor_scales(kv_scales)


def _check_token_scales(kv_scales: Tensor, key_cache: Tensor) -> None:
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    checks.check_tensor("kv_scales", kv_scales, 4, torch.float32, key_cache.device)
    shape = (num_blocks, 2, num_kv_heads, block_size)
    checks.check_shape("kv_scales", kv_scales, shape, "(num_blocks, 2, num_kv_heads, block_size)")


def _check_tensor_scales(kv_scales: tuple[float, float]) -> None:
    if len(kv_scales) != 2 or not all(math.isfinite(scale) and scale > 0 for scale in kv_scales):
        raise ValueError(f"kv_scales is {kv_scales}; it must be two finite numbers above 0, or a tensor")


def row_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale of each row [..., head_dim]: its largest magnitude over the format's largest number.

    A row of zeros gets 1, an infinity counts as the largest float32, and a NaN makes the scale NaN.
    """
    largest = rows.float().abs().amax(dim=-1)
    divisor = torch.full_like(
        largest, LARGEST[dtype]
    )  # by a plain number a GPU multiplies with its rounded inverse
    scales = (largest.clamp(max=torch.finfo(torch.float32).max) / divisor).clamp(min=_SMALLEST_NORMAL)
    return torch.where(largest == 0, torch.ones_like(scales), scales)


def quantize(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows [..., head_dim] over their scales [...] in 8 bits. NaN stays NaN in float8 and is 0 in int8."""
    largest = LARGEST[dtype]
    numbers = (rows.float() / scales[..., None]).clamp(-largest, largest)
    if dtype is torch.int8:
        return numbers.round().nan_to_num(0.0).to(dtype)
    codes = numbers.to(dtype).view(torch.uint8)
    return torch.where(numbers.isnan(), torch.full_like(codes, 0x7F), codes).view(dtype)


def dequantize(key_cache: Tensor, value_cache: Tensor, kv_scales: KvScales) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of a layer as float32, each of its cache's shape.

    Args:
        key_cache, value_cache: int8 or float8_e4m3fn [num_blocks, num_kv_heads, block_size, head_dim_k or _v].
        kv_scales: float32 [num_blocks, 2, num_kv_heads, block_size], or the keys' and the values' scale.

    Raises:
        TypeError, ValueError: a tensor or a scale does not fit.
    """
    checks.check_caches(key_cache, value_cache, key_cache.device)
    check_scales(kv_scales, key_cache, key_cache.dtype)
    keys, values = key_cache.float(), value_cache.float()
    if isinstance(kv_scales, Tensor):
        return keys * kv_scales[:, 0, :, :, None], values * kv_scales[:, 1, :, :, None]
    return keys * kv_scales[0], values * kv_scales[1]
