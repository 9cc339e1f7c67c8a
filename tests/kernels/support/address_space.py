"""Tensors of zeros that take address space and no memory until they are touched."""

from __future__ import annotations

import mmap

import torch
from paged_cases import DEVICE

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.12 on


def lazy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of any size; in host memory only the pages that are read or written become real."""
    if DEVICE.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    space = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(space, dtype=dtype).view(shape)
