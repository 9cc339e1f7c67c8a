"""A model with its weights in float32 for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from pykv.host_memory import anonymous_memory, available_bytes

__all__ = ["float32_fits", "float32_weights"]

# Beyond so many bytes the copy would take longer than a load should.
LARGEST_COPY_BYTES = 8 << 30


def float32_fits(module: nn.Module) -> bool:
    """Whether a copy of all weights in float32 is small, and fits into half of what its memory has left."""
    needed = sum(4 * tensor.numel() for tensor in module.parameters())
    device = next(module.parameters()).device
    left = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    return needed <= min(LARGEST_COPY_BYTES, left // 2 if left is not None else LARGEST_COPY_BYTES)


@contextmanager
def float32_weights(module: nn.Module) -> Iterator[None]:
    """Gives the module float32 copies of its weights and buffers, and its own ones back at the end."""
    kept = [(tensor, tensor.data) for tensor in _half_tensors(module)]
    try:
        for (tensor, own), space in zip(kept, _spaces([own for _, own in kept]), strict=True):
            tensor.data = space.copy_(own)
        yield
    finally:
        for tensor, own in kept:
            tensor.data = own


def _half_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            yield tensor


def _spaces(tensors: list[Tensor]) -> Iterator[Tensor]:
    """A float32 tensor of each shape. On a CPU all are in one piece, which goes back to the system as a whole."""
    on_cpu = [tensor.device.type == "cpu" for tensor in tensors]
    if not tensors or not all(on_cpu):
        yield from (torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors)
        return
    sizes = [tensor.numel() for tensor in tensors]
    memory = torch.frombuffer(anonymous_memory(4 * sum(sizes)), dtype=torch.float32)
    for tensor, part in zip(tensors, torch.split(memory, sizes), strict=True):
        yield part.view(tensor.shape)
