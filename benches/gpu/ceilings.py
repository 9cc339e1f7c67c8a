"""What can this device do at best: a copy's bytes a second, and a large bf16 matrix product's operations?"""

from __future__ import annotations

import platform

import torch
import triton
from machine import Part, open_part

from pykv.kernels.target import current_target


def describe(part: Part) -> None:
    """The versions and the device."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": "cpu" if part.machine.dry else torch.cuda.get_device_name(),
        "target": current_target(torch.device(part.machine.device)).name,
    }
    for name, value in facts.items():
        part.report.add("environment", name, value, "text")


def copy(part: Part) -> None:
    """A device-to-device copy, read and written bytes."""
    size = 1 << (20 if part.machine.dry else 32)
    source = torch.empty(size, dtype=torch.uint8, device=part.machine.device).fill_(3)
    target = torch.empty_like(source)
    seconds = part.machine.seconds([lambda: target.copy_(source)])
    part.report.add("copy", "bandwidth", 2 * size / seconds / 1e9, "GB/s", 15)


def product(part: Part) -> None:
    """A square product of random bf16 matrices."""
    size = 64 if part.machine.dry else 8192
    a = torch.randn(size, size, device=part.machine.device).bfloat16()
    b = torch.randn(size, size, device=part.machine.device).bfloat16()
    out = torch.empty_like(a)
    seconds = part.machine.seconds([lambda: torch.mm(a, b, out=out)])
    part.report.add("matrix product bf16", "rate", 2 * size**3 / seconds / 1e12, "TFLOP/s", 15)


if __name__ == "__main__":
    opened = open_part("ceilings")
    for name, run in {"environment": describe, "copy": copy, "matrix product bf16": product}.items():
        opened.attempt(name, lambda run=run: run(opened))
