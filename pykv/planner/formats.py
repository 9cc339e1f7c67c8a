"""How the KV cache and the weights are stored, by name."""

from __future__ import annotations

from fractions import Fraction

from pykv.kv_format import SCALE_BYTES, DtypeFormat, KvFormat, kv_format_of
from pykv.planner.checks import checked_choice, refused

__all__ = ["KV_SCALES", "WEIGHT_BITS", "is_eight_bit", "kv_format", "scale_bytes", "weights_dtype"]

KV_SCALES = ("token_head", "tensor")
"""Where an 8-bit cache has its scales: one for each (token, head) of keys and of values, or one for a tensor."""

SHORT_NAMES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}

# Weights of 4 bits have a scale, and some a zero point, for each group of values: of 128 (AWQ and GPTQ: 16 and 4
# bits), 32 (MXFP4: 8 bits) or 16 (NVFP4: 8 bits).
WEIGHT_BITS = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "fp8": Fraction(8),
    "int8": Fraction(8),
    "int4": Fraction(4) + Fraction(20, 128),
    "mxfp4": Fraction(4) + Fraction(8, 32),
    "nvfp4": Fraction(4) + Fraction(8, 16),
}


def kv_format(dtype: object, scales: object = "token_head") -> KvFormat:
    """The format of a KV cache: one that pykv brings, or that was registered.

    Raises:
        ConfigError: the format or the place of the scales is unknown.
    """
    if not isinstance(dtype, (str, KvFormat)):
        raise refused("kv_dtype", dtype, "the name of a format, such as bf16 or fp8")
    found = kv_format_of(dtype)
    place = checked_choice("kv_scales", scales, KV_SCALES)
    if place == "tensor" and isinstance(found, DtypeFormat) and found.is_scaled:
        return found.with_tensor_scales(1.0, 1.0)
    return found


def scale_bytes(of: KvFormat) -> int:
    """The bytes of a row's scale, which `row_bytes` counts; 0 where rows have none, or only the format knows."""
    return SCALE_BYTES if isinstance(of, DtypeFormat) and of.has_row_scales else 0


def is_eight_bit(of: KvFormat) -> bool:
    """Whether the numbers have 8 bits and scales."""
    return isinstance(of, DtypeFormat) and of.is_scaled


def weights_dtype(dtype: object) -> str:
    """The full name of a dtype of weights.

    Raises:
        ConfigError: it is unknown.
    """
    name = SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    return checked_choice("weights_dtype", name, WEIGHT_BITS)
