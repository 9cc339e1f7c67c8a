"""Linear layers whose weights are laid out once for the CPU's matrix instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack"]

# Smaller layers gain nothing; routers of experts are such.
SMALLEST_WEIGHT = 1 << 14

# Rows of the self-check: one, a few and many take different paths in the library.
CHECKED_ROWS = (1, 5, 40)

# Largest error of the self-check against the plain product, relative to the largest result.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


# A product of so few rows may be summed in another order than one of many; with more rows it takes no longer.
MOST_ADDED_ROWS = 3
COMPARED_ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Computes what `torch.nn.functional.linear` computes, from a weight that oneDNN has reordered.

    From a plain weight the library reorders it in each call, which for a few rows takes longer than the product
    itself.

    Attributes:
        weight: an opaque tensor; only this class reads it.
        bias: [out_features], or None.
        out_features: the size of the last dimension of the result.
        least_rows: fewer are computed with rows of zeros beside them, so that a row's result does not depend on how
            many there are, as long as torch has the number of threads that it had when the weight was packed: a
            `torch.set_num_threads` after that ends the promise. None where no few rows give it.
    """

    weight: Tensor
    bias: Tensor | None
    out_features: int
    least_rows: int | None = 1

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Packs a weight [out_features, in_features], which itself stays as it is."""
        least_rows = _least_rows(*weight.shape, weight.dtype, torch.get_num_threads())
        return cls(_packed(weight), bias, weight.shape[0], least_rows)

    def compute(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if not input.numel():
            return input.new_empty((*input.shape[:-1], self.out_features))
        num_rows = input.numel() // input.shape[-1]
        if self.least_rows is None or num_rows >= self.least_rows:
            return _product(input, self.weight, self.bias)
        rows = nn.functional.pad(input.reshape(num_rows, -1), (0, 0, 0, self.least_rows - num_rows))
        result = _product(rows, self.weight, self.bias)[:num_rows]
        return result.view(*input.shape[:-1], self.out_features)

    def agrees_with(self, weight: Tensor) -> bool:
        """Whether the results are those of the plain `weight`, up to rounding."""
        generator = torch.Generator().manual_seed(0)
        return all(
            self._agrees(torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype), weight)
            for rows in CHECKED_ROWS
        )

    def _agrees(self, inputs: Tensor, weight: Tensor) -> bool:
        expected = nn.functional.linear(inputs, weight, self.bias).float()
        error = (self.compute(inputs).float() - expected).abs().max()
        return bool(error <= TOLERANCES[weight.dtype] * expected.abs().max())


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return result


@cache
def _least_rows(out_features: int, in_features: int, dtype: torch.dtype, num_threads: int) -> int | None:
    """From how many rows on a row's result is the same whatever their number; None where that takes too many.

    The order of a sum depends on shapes, type and threads alone, so it is seen in a product of this shape whose exact
    result is 0: what is left is rounding, and differs wherever the order does.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(min(out_features, 256), in_features // 2, generator=generator).to(dtype)
    repeats = -(-out_features // len(half))
    weight = torch.cat([half, -half, half.new_zeros(len(half), in_features % 2)], dim=1)
    packed = _packed(weight.repeat(repeats, 1)[:out_features].contiguous())
    part = torch.randn(1, in_features // 2, generator=generator).to(dtype)
    row = torch.cat([part, part, part.new_zeros(1, in_features % 2)], dim=1)
    results = {rows: _product(row.repeat(rows, 1), packed, None) for rows in COMPARED_ROWS}
    expected = results[COMPARED_ROWS[-1]][:1]
    differing = [
        rows for rows, result in results.items() if not torch.equal(result, expected.expand_as(result))
    ]
    least = max(differing, default=0) + 1
    return least if least <= 1 + MOST_ADDED_ROWS else None


def can_pack(layer: nn.Module) -> bool:
    """Whether this layer is a plain linear one, on a CPU and in a type whose packed form is faster."""
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
        return False
    return (
        layer.weight.numel() >= SMALLEST_WEIGHT
        and layer.weight.is_contiguous()
        and _is_served(layer.weight.dtype)
    )


def _is_served(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
