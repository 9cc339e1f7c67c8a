"""What an element of the KV cache and a parameter of the weights take, by the name of their dtype."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pykv.layout import ELEMENT_BYTES
from pykv.planner.checks import checked_choice

__all__ = ["KV_SCALES", "SCALE_BYTES", "WEIGHT_BITS", "KvFormat", "kv_format", "weights_dtype"]

SCALE_BYTES = 4
"""A scale of an 8-bit cache is a float32."""

KV_SCALES = ("token_head", "tensor")
"""Where an 8-bit cache has its scales: one for each (token, head) of keys and of values, or one for a tensor."""

EIGHT_BIT = ("int8", "fp8")
SHORT_NAMES = {
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
}

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


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How keys and values are stored.

    Attributes:
        dtype: the name of the elements' dtype.
        element_bytes: the bytes of one element.
        has_scales: whether a float32 scale is stored for each (token, head) of keys and of values.
    """

    dtype: str
    element_bytes: int
    has_scales: bool


def kv_format(dtype: object, scales: object = "token_head") -> KvFormat:
    """The format of a KV cache.

    Raises:
        ConfigError: the dtype or the place of the scales is unknown.
    """
    known = {**ELEMENT_BYTES, **dict.fromkeys(EIGHT_BIT, 1)}
    name = checked_choice("kv_dtype", _full_name(dtype), known)
    place = checked_choice("kv_scales", scales, KV_SCALES)
    return KvFormat(name, known[name], has_scales=name in EIGHT_BIT and place == "token_head")


def weights_dtype(dtype: object) -> str:
    """The full name of a dtype of weights.

    Raises:
        ConfigError: it is unknown.
    """
    return checked_choice("weights_dtype", _full_name(dtype), WEIGHT_BITS)


def _full_name(dtype: object) -> object:
    return SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
