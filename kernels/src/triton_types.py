"""Torch's types as the kernels name them."""

from __future__ import annotations

import torch
import triton.language as tl

from pykv.kernels.target import Target

__all__ = ["precision", "triton_type"]

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """The type of the products inside a kernel.

    Raises:
        TypeError: the kernels do not compute in this type.
    """
    if dtype not in _TYPES:
        allowed = ", ".join(str(known) for known in _TYPES)
        raise TypeError(f"the queries have dtype {dtype}; the triton backend takes {allowed}")
    return _TYPES[dtype]


def precision(dtype: torch.dtype, target: Target) -> str:
    """The precision of a product: float32 stays float32, on NVIDIA as three products of tf32 parts.

    A plain float32 product is computed without the matrix units there, and spills registers by the kilobyte.
    """
    if dtype != torch.float32:
        return "tf32"  # has no effect on narrower types
    return "tf32x3" if target.family == "sm" else "ieee"
