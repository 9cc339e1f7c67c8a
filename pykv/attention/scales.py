"""What the numbers of 8-bit caches are multiplied by, and how they come about.

A number is stored as `number / scale`, divided in float32, rounded to the nearest (ties to even) and held inside the
format's range: -127 to 127 for int8, -448 to 448 for float8_e4m3fn. Every backend writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention import checks
from pykv.field_checks import shown

KvScales = Tensor | tuple[float, float]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def check_cache_dtype(key_cache: Tensor, query_dtype: torch.dtype) -> None:
    """Raises TypeError unless attention can read the cache: it has the query's dtype, or 8 bits."""
    checks.device_of("key_cache", key_cache)
    if key_cache.dtype is not query_dtype and key_cache.dtype not in LARGEST:
        allowed = ", ".join(map(str, (query_dtype, *LARGEST)))
        raise TypeError(f"key_cache has dtype {key_cache.dtype}: allowed are {allowed}")


def checked_scales(kv_scales: KvScales | None, key_cache: Tensor, name: str = "kv_scales") -> KvScales | None:
    """Returns the scales, two numbers as floats, of caches of 8 bits; others have none.

    Raises:
        TypeError, ValueError: see `pykv.attention.paged_attention`.
    """
    if key_cache.dtype not in LARGEST:
        if kv_scales is not None:
            raise ValueError(
                f"{name} is {_told(kv_scales)}; it must be None for a cache of {key_cache.dtype}"
            )
        return None
    return _given_scales(kv_scales, key_cache, name)


def _given_scales(kv_scales: KvScales | None, key_cache: Tensor, name: str) -> KvScales:
    if kv_scales is None:
        raise ValueError(f"{name} is None; it must be given for a cache of {key_cache.dtype}")
    if isinstance(kv_scales, Tensor):
        _check_token_scales(kv_scales, key_cache, name)
        return kv_scales
    return _two_numbers(kv_scales, name)


def checked_scales_of_layers(
    kv_scales: Sequence[KvScales | None] | None, key_caches: Sequence[Tensor]
) -> list[KvScales | None]:
    """Returns each layer's scales; where none are given, no layer may need any.

    Raises:
        TypeError, ValueError: see `pykv.attention.copy_blocks`.
    """
    if kv_scales is not None:
        checks.check_sequence("kv_scales", kv_scales)
    if kv_scales is None or len(kv_scales) == 0:
        kv_scales = [None] * len(key_caches)
    if len(kv_scales) != len(key_caches):
        raise ValueError(
            f"kv_scales has {len(kv_scales)} entries; it must have none or one for each of the {len(key_caches)} layers"
        )
    return [
        checked_scales(scales, key_cache, f"kv_scales[{layer}]")
        for layer, (scales, key_cache) in enumerate(zip(kv_scales, key_caches, strict=True))
    ]


def _check_token_scales(kv_scales: Tensor, key_cache: Tensor, name: str) -> None:
    num_blocks, num_kv_heads, block_size, _ = key_cache.shape
    checks.check_tensor(name, kv_scales, 4, torch.float32, key_cache.device)
    shape = (num_blocks, 2, num_kv_heads, block_size)
    checks.check_shape(name, kv_scales, shape, "(num_blocks, 2, num_kv_heads, block_size)")


def _two_numbers(kv_scales: object, name: str) -> tuple[float, float]:
    allowed = "it must be two finite numbers above 0, or a tensor"
    if not isinstance(kv_scales, Sequence) or not all(map(checks.is_number, kv_scales)):
        raise TypeError(f"{name} is {_told(kv_scales)}; {allowed}")
    numbers = [checks.as_float(scale) for scale in kv_scales]
    if len(numbers) != 2 or not all(math.isfinite(scale) and scale > 0 for scale in numbers):
        raise ValueError(f"{name} is {_told(kv_scales)}; {allowed}")
    return numbers[0], numbers[1]


def _told(kv_scales: object) -> str:
    """As an error shows it: of a tensor the kind, since its numbers may be on a GPU."""
    if isinstance(kv_scales, Tensor):
        return f"a tensor of {kv_scales.dtype} {tuple(kv_scales.shape)}"
    return shown(kv_scales)


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
    device = checks.device_of("key_cache", key_cache)
    if key_cache.dtype not in LARGEST:
        raise TypeError(f"key_cache has dtype {key_cache.dtype}: allowed are {', '.join(map(str, LARGEST))}")
    checks.check_caches(key_cache, value_cache, device)
    scales = _given_scales(kv_scales, key_cache, "kv_scales")
    keys, values = key_cache.float(), value_cache.float()
    if isinstance(scales, Tensor):
        return keys * scales[:, 0, :, :, None], values * scales[:, 1, :, :, None]
    return keys * scales[0], values * scales[1]
