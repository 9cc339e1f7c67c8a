"""How many instructions does the inner loop of a decode issue for a key or value element, and how many are allowed?

Compiles ahead for GPUs that are not here and reads the machine code: it needs no GPU, and TRITON_INTERPRET unset.
What is allowed follows from the device: at full memory bandwidth a multiprocessor receives so many elements a clock,
and its four schedulers issue four instructions of 32 lanes in it.
Run: benches/gpu/instructions.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from machine import SUPPORT
from report import Report

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# (bytes a second, multiprocessors, clock) by the vendors' data sheets.
DEVICES = {"sm_80": (2.04e12, 108, 1.41e9), "sm_90": (4.8e12, 132, 1.98e9), "sm_100": (8.0e12, 148, 1.96e9)}
CACHES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def inner_loop(kernel: Any) -> list[str]:
    """The instructions of the shortest loop that multiplies matrices."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [str(NVDISASM), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    loops = []
    for end, instruction in enumerate(instructions):
        target = re.search(r"BRA.*?(\.L_x_\d+)", instruction)
        if target and labels.get(target[1], end + 1) <= end:
            body = instructions[labels[target[1]] : end + 1]
            if any("MMA" in each for each in body):
                loops.append(body)
    return min(loops, key=len)


def main() -> None:
    sys.path.insert(0, str(SUPPORT))
    from launch_matrix import Setting, compile_attention

    report = Report("instructions", None)
    for target, (bandwidth, processors, clock) in DEVICES.items():
        for name, cache in CACHES.items():
            for block_size in (16, 64):
                kernel = compile_attention(target, Setting(cache=cache, block_size=block_size))[0]
                elements = 64 * (128 + 128)  # keys and values of one tile, shared by four warps
                issued = len(inner_loop(kernel)) * kernel.metadata.num_warps * 32 / elements
                allowed = 4 * 32 / (bandwidth / cache.itemsize / processors / clock)
                case = f"{target} {name} block {block_size}"
                report.add(case, "instructions an element", round(issued, 2), "1")
                report.add(case, "allowed at full bandwidth", round(allowed, 2), "1")


if __name__ == "__main__":
    main()
