"""Compiles what a launcher would launch, for GPUs that are not there, and reads back what the code needs.

Inside `compiling_for(name)` every launch, with meta tensors of any size, compiles exactly the specialization that a
real one would, and launches nothing. It needs a process in which TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs.

    registers: of a thread (vector registers on AMD); spilled_bytes: written to local memory by a thread;
    shared_bytes: of a program.
    """

    kernel: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int


class AbsentDriver(DriverBase):
    """Answers as the driver of a machine with the target's GPU would; it cannot launch."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return self.name  # the key of the kernels' caches: one for each target

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be timed ahead of time")


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[list[Any]]:
    """Compiles instead of launching; yields the list of compiled kernels, filled as they come."""
    compiled: list[Any] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    driver.set_active(AbsentDriver(name))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = active


def resources(kernel: Any) -> Resources:
    """Reads registers, spills and shared memory from the machine code."""
    target = kernel.metadata.target
    read = _nvidia_code if target.backend == "cuda" else _amd_code
    registers, spilled_bytes = read(kernel)
    return Resources(
        kernel=kernel.metadata.name,
        target=str(target.arch),
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
    )


def _nvidia_code(kernel: Any) -> tuple[int, int]:
    """Assembles the PTX once more, because the assembler's report alone tells spills from other local memory."""
    ptx = kernel.asm["ptx"]
    architecture = _found(r"\.target (sm_\d+a?)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        Path(source).write_text(ptx)
        assembler = get_ptxas(kernel.metadata.target.arch).path
        command = [
            assembler,
            "-v",
            f"--gpu-name={architecture}",
            source,
            "-o",
            os.path.join(folder, "kernel"),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(_found(r"Used (\d+) registers", report)), int(_found(r"(\d+) bytes spill stores", report))


def _amd_code(kernel: Any) -> tuple[int, int]:
    assembly = kernel.asm["amdgcn"]
    registers = int(_found(r"\.vgpr_count:\s+(\d+)", assembly))
    return registers, 4 * int(_found(r"\.vgpr_spill_count:\s+(\d+)", assembly))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern!r} was not found in {text[-2000:]!r}")
    return match[1]
