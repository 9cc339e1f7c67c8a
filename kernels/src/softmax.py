"""Device functions of the streaming softmax in base 2, shared by decode and prefill."""
# mypy: allow-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.cache_format import SAME
from pykv.kernels.eight_bit import decode_halves, log2_floor

__all__ = [
    "LN2",
    "LOG2E",
    "accumulate",
    "add_sink",
    "cap_scores",
    "empty_sums",
    "finish",
    "log_sum_exp",
    "normalize",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cap_scores(scores, softcap):
    """softcap * tanh(scores / softcap), in base 2; exact at both ends, however large the scores are."""
    power = tl.math.exp2(tl.minimum(scores * (2.0 * LOG2E / softcap), 60.0))
    return (softcap * LOG2E) * ((power - 1.0) / (power + 1.0))


@triton.jit
def empty_sums(FORMAT: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The weighted sums before the first tile, in two parts: as `accumulate` takes them."""
    if FORMAT == SAME:
        return tl.zeros([ROWS, PADDED], tl.float32), 0.0
    else:
        return tl.zeros([ROWS, PADDED // 2], tl.float32), tl.zeros([ROWS, PADDED // 2], tl.float32)


@triton.jit
def accumulate(
    scores, values, value_scales, maximum, denominator, first, second,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Adds one tile: scores [rows, TILE] in base 2 (-inf: not seen) and values as stored.

    The weighted sums are one tensor, or for 8-bit caches their even and odd columns. With scaled values the running
    maximum is that of score + log2(scale), rounded down, so that the weights, scale included, stay below 2: they fit
    float16 whatever the scales are.
    """
    reference = scores if FORMAT == SAME else scores + log2_floor(value_scales)[None, :]
    highest = tl.maximum(maximum, tl.max(reference, 1))
    shift = tl.where(highest > float("-inf"), highest, 0.0)  # a row may have seen nothing yet
    probabilities = tl.math.exp2(scores - shift[:, None])
    rescale = tl.math.exp2(maximum - shift)
    denominator = denominator * rescale + tl.sum(probabilities, 1)
    first = first * rescale[:, None]
    if FORMAT == SAME:
        first = tl.dot(probabilities.to(DTYPE), values, acc=first, input_precision=PRECISION)
    else:
        even, odd = decode_halves(values, FORMAT, DTYPE, TILE, PADDED)
        weights = (probabilities * value_scales[None, :]).to(DTYPE)
        first = tl.dot(weights, even, acc=first, input_precision=PRECISION)
        second = tl.dot(weights, odd, acc=second * rescale[:, None], input_precision=PRECISION)
    return highest, denominator, first, second


@triton.jit
def finish(first, second, FORMAT: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """The weighted sums as one tensor [ROWS, PADDED]."""
    if FORMAT == SAME:
        return first
    else:
        return tl.reshape(tl.join(first, second), (ROWS, PADDED))


@triton.jit
def add_sink(sink, maximum, denominator, accumulator):
    """Gives the sink (a score in base 2, one a row) its share of the softmax; it adds no value.

    A row that has seen nothing stays as it is: its log-sum-exp is that of no key.
    """
    sink = tl.where(denominator > 0, sink, float("-inf"))
    highest = tl.maximum(maximum, sink)
    shift = tl.where(highest > float("-inf"), highest, 0.0)
    rescale = tl.math.exp2(maximum - shift)
    denominator = denominator * rescale + tl.math.exp2(sink - shift)
    return highest, denominator, accumulator * rescale[:, None]


@triton.jit
def normalize(denominator, accumulator):
    """The weighted mean; zeros where nothing was seen."""
    return accumulator / tl.where(denominator > 0, denominator, 1.0)[:, None]


@triton.jit
def log_sum_exp(maximum, denominator):
    """log2 of the summed weights; -inf where nothing was seen, NaN where a NaN was: it must not pass for nothing."""
    seen = denominator != 0
    return tl.where(seen, maximum + tl.math.log2(tl.where(seen, denominator, 1.0)), float("-inf"))
