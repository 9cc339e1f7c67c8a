"""What the kernels run on, as Triton's active driver reports it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

__all__ = ["INTERPRETER", "Target", "current_target", "on_device_of", "what_is_missing"]

# Multiprocessors (compute units) and shared memory of the parts that we compile for; a real GPU is asked itself.
_NUM_PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "gfx942": 304}
_SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device.

    Attributes:
        name: `sm_90`, `gfx942`, …, or `interpreter`.
        num_processors: how many multiprocessors or compute units it has.
        shared_bytes: the shared memory that one program may take, bytes.
        native_e4m3: whether it converts e4m3 (the `fn` form, with 448 as the largest value) in hardware.
    """

    name: str
    num_processors: int
    shared_bytes: int
    native_e4m3: bool

    @property
    def family(self) -> str:
        """`sm`, `gfx` or `interpreter`: the makes that share a default."""
        return next((family for family in ("sm", "gfx") if self.name.startswith(family)), self.name)


INTERPRETER = Target("interpreter", num_processors=8, shared_bytes=1 << 30, native_e4m3=False)


def current_target(device: torch.device) -> Target:
    """The target that a launch with tensors on `device` would run on; "cuda" alone is the current one."""
    if device.type == "cuda":
        return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)
    return INTERPRETER if triton.knobs.runtime.interpret else _of_driver(device)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where Triton launches on the tensor's device: by itself it goes by the current one, whatever the pointers are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def what_is_missing(device_type: str) -> str | None:
    """What the kernels lack to run on tensors of this device; None if they run."""
    if triton.knobs.runtime.interpret:
        return None
    if device_type != "cuda":
        return "the Triton kernels run on GPUs (elsewhere in Triton's interpreter alone: TRITON_INTERPRET=1)"
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError as error:
        return f"Triton cannot use the GPU: {error}"
    return None


@functools.cache
def _of_gpu(index: int) -> Target:
    """A real GPU does not change; asking the driver at every launch would take longer than the launch."""
    with torch.cuda.device(index):
        return _of_driver(torch.device("cuda", index))


def _of_driver(device: torch.device) -> Target:
    reported = triton.runtime.driver.active.get_current_target()
    name = f"sm_{reported.arch}" if reported.backend == "cuda" else str(reported.arch).partition(":")[0]
    return Target(
        name,
        num_processors=_num_processors(name, device),
        shared_bytes=_shared_bytes(name, device),
        native_e4m3=reported.backend == "cuda" and int(reported.arch) >= 89,
    )


def _num_processors(name: str, device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return _NUM_PROCESSORS.get(name, 100)


def _shared_bytes(name: str, device: torch.device) -> int:
    """What Triton itself checks a program against."""
    if device.type == "cuda":
        return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
    return _SHARED_BYTES.get(name, 64 << 10)
