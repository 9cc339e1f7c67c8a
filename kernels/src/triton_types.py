"""Torch's types as the kernels name them."""

from __future__ import annotations

import torch
import triton.language as tl

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


def precision(dtype: torch.dtype) -> str:
    """The precision of a product: float32 is multiplied as such, not rounded to tf32 first."""
    return "ieee" if dtype == torch.float32 else "tf32"
