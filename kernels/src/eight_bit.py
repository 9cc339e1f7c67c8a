"""Device functions for the 8-bit cache formats: the same bytes and values on every target and in the interpreter."""
# mypy: allow-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.cache_format import E4M3_NATIVE, E4M3_SOFTWARE, INT8

__all__ = [
    "E4M3_SOFTWARE_UNIT",
    "decode_halves",
    "encode",
    "largest_code",
    "log2_floor",
    "quotient",
    "round_half_even",
    "row_scales",
]

_LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
# The software decoder leaves every e4m3 value divided by this; whoever uses it multiplies a scale by it instead.
E4M3_SOFTWARE_UNIT = tl.constexpr(256.0)


@triton.jit
def round_half_even(x):
    """float32 to the nearest whole number, ties to even, for |x| < 2^22: no library call, so it runs everywhere."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quotient(x, y):
    """x / y rounded correctly (the plain operator is an approximation on NVIDIA)."""
    return tl.math.div_rn(x, y)


@triton.jit
def log2_floor(x):
    """The exponent of a positive float32, as a float32: the whole part of its log2; -127 for zero."""
    return ((x.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def largest_code(FORMAT: tl.constexpr):
    """The largest magnitude that the format holds."""
    if FORMAT == INT8:
        return 127.0
    else:
        return 448.0


@triton.jit
def row_scales(rows, FORMAT: tl.constexpr):
    """The scale of each row of float32 [rows, columns]: its largest magnitude over the format's.

    1 for a row of zeros; an infinity counts as the largest float32; a NaN makes the scale NaN.
    """
    magnitude = tl.max(tl.abs(rows), 1)
    scales = quotient(tl.minimum(magnitude, _LARGEST_FLOAT32), largest_code(FORMAT))
    scales = tl.where(magnitude == 0, 1.0, tl.maximum(scales, _SMALLEST_NORMAL))
    num_nans = tl.sum((rows != rows).to(tl.int32), 1)  # a GPU's maximum passes over them
    return tl.where(num_nans > 0, float("nan"), scales)


@triton.jit
def _e4m3_bits(x):
    """float32 to e4m3 codes (uint8): ties to even, saturating at 448, NaN is 0x7F."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # Normal values: round at bit 20 of float32, then move the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Values below 2^-6 are whole multiples of 2^-9.
    subnormal = round_half_even(magnitude * 512.0).to(tl.uint32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)


@triton.jit
def encode(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """float32, already divided by its scale, to the cache's elements; NaN is 0 in int8."""
    if FORMAT == INT8:
        held = tl.minimum(tl.maximum(x, -127.0), 127.0)
        return round_half_even(tl.where(x == x, held, 0.0)).to(tl.int8)
    elif FORMAT == E4M3_SOFTWARE:
        return _e4m3_bits(x)
    else:
        return x.to(DTYPE)


@triton.jit
def _pairs_to_float16(pairs, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """uint32 [ROWS, WORDS], each the bits of two float16, to float16 [ROWS, 2 * WORDS]."""
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, 2 * WORDS))


@triton.jit
def _int8_halves(words):
    """Four int8 a word to the float16 bits of 1152 + x, of the even and of the odd bytes: exact in one step.

    1024 + (x + 128) has the eight bits of x + 128 as the last digits of a float16.
    """
    shifted = words ^ 0x80808080
    return (shifted & 0x00FF00FF) | 0x64006400, ((shifted >> 8) & 0x00FF00FF) | 0x64006400


@triton.jit
def _e4m3_halves(words):
    """Four e4m3 a word to the float16 bits of x / 256, exact, subnormals included: every bit moves to its place."""
    even = ((words << 8) & 0x80008000) | ((words << 7) & 0x3F803F80)
    odd = (words & 0x80008000) | ((words >> 1) & 0x3F803F80)
    return even, odd


@triton.jit
def decode_halves(raw, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """A tile of an 8-bit cache to its even and its odd columns, each DTYPE [ROWS, PADDED / 2], without their scales.

    Two halves, because the transposed operand of a product gathers single bytes otherwise. The tile is uint32
    [ROWS, PADDED / 4] (four codes a word, two decoded by each operation), or e4m3 [ROWS, PADDED] where the hardware
    converts. E4M3_SOFTWARE leaves the values over E4M3_SOFTWARE_UNIT.
    """
    if FORMAT == E4M3_NATIVE:
        even, odd = tl.split(tl.reshape(raw.to(tl.float16), (ROWS, PADDED // 2, 2)))
    elif FORMAT == E4M3_SOFTWARE:
        even_bits, odd_bits = _e4m3_halves(raw)
        even = _pairs_to_float16(even_bits, ROWS, PADDED // 4)
        odd = _pairs_to_float16(odd_bits, ROWS, PADDED // 4)
    else:
        even_bits, odd_bits = _int8_halves(raw)
        even = _pairs_to_float16(even_bits, ROWS, PADDED // 4) - 1152.0
        odd = _pairs_to_float16(odd_bits, ROWS, PADDED // 4) - 1152.0
    return even.to(DTYPE), odd.to(DTYPE)
