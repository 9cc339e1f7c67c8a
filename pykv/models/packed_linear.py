"""Linear layers whose weights are laid out once for the CPU's matrix instructions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["PackedLinear", "can_pack"]

# Smaller layers gain nothing; routers of experts are such.
SMALLEST_WEIGHT = 1 << 14

# Rows of the self-check: one, a few and many take different paths in the library.
CHECKED_ROWS = (1, 5, 40)

# Largest error of the self-check against the plain product, relative to the largest result.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Computes what `torch.nn.functional.linear` computes, from a weight that oneDNN has reordered.

    From a plain weight the library reorders it in each call, which for a few rows takes longer than the product
    itself.

    Attributes:
        weight: an opaque tensor; only this class reads it.
        bias: [out_features], or None.
        out_features: the size of the last dimension of the result.
    """

    weight: Tensor
    bias: Tensor | None
    out_features: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Packs a weight [out_features, in_features], which itself stays as it is."""
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight, None), bias, weight.shape[0])

    def compute(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if not input.numel():
            return input.new_empty((*input.shape[:-1], self.out_features))
        result: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return result

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
