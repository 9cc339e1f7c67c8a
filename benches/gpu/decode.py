"""How close to a copy does a decode read its cache, for each cache type, batch and context, beside PyTorch's attention?

Left out of the timing: allocation, launch gaps (a CUDA graph), the rivals' gathering of pages. Every case is checked
against float64 first. Run: benches/gpu/decode.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import random

import torch
from machine import Part, open_part
from paged_problem import PagedProblem, Shape, build_problem
from rivals import flex, sdpa
from torch.nn.attention import SDPBackend

MIXED = tuple((1, length) for length in random.Random(5).choices(range(512, 16384), k=64))
L2_BYTES = 200_000_000  # several times the second-level cache of any device
CASES = {
    "batch 8 context 8192 bf16": Shape(((1, 8192),) * 8),
    "batch 8 context 8192 fp8": Shape(((1, 8192),) * 8, "fp8"),
    "batch 8 context 8192 int8": Shape(((1, 8192),) * 8, "int8"),
    "batch 32 context 8192 bf16": Shape(((1, 8192),) * 32),
    "batch 32 context 8192 fp8": Shape(((1, 8192),) * 32, "fp8"),
    "batch 32 context 8192 int8": Shape(((1, 8192),) * 32, "int8"),
    "batch 32 context 8192 bf16 block 64": Shape(((1, 8192),) * 32, block_size=64),
    "batch 32 context 8192 fp8 block 64": Shape(((1, 8192),) * 32, "fp8", block_size=64),
    "batch 32 context 8192 bf16 block 48": Shape(((1, 8192),) * 32, block_size=48),
    "batch 128 context 1024 bf16": Shape(((1, 1024),) * 128),
    "batch 1 context 131072 bf16": Shape(((1, 131072),)),
    "batch 64 mixed contexts bf16": Shape(MIXED),
    "batch 64 mixed contexts fp8": Shape(MIXED, "fp8"),
    "batch 16 context 4096 bf16 ratio 1": Shape(((1, 4096),) * 16, num_kv_heads=32),
    "batch 32 context 8192 bf16 head 64 ratio 8": Shape(((1, 8192),) * 32, head_dim=64),
    "batch 16 context 8192 bf16 head 256 ratio 2": Shape(
        ((1, 8192),) * 16, num_heads=16, num_kv_heads=8, head_dim=256
    ),
}
DRY_CASES = {
    "batch 2 context 70 bf16": Shape(((1, 70),) * 2, num_heads=4, num_kv_heads=2, head_dim=32),
    "batch 2 mixed fp8": Shape(((1, 70), (1, 33)), "fp8", num_heads=4, num_kv_heads=2, head_dim=32),
}
WITH_RIVALS = ("batch 8 context 8192 bf16", "batch 32 context 8192 bf16", "batch 2 context 70 bf16")


def measure(part: Part, case: str, shape: Shape) -> None:
    problem = build_problem(shape, part.machine.device)
    problem.attend()
    if part.slice is not None:
        return
    error = problem.relative_error(sorted({0, len(shape.rows) // 2, len(shape.rows) - 1}))
    part.report.add(case, "relative error", error, "1")
    if not error < 2e-2:
        raise AssertionError(f"the relative error is {error}")
    copies = [problem]
    while len(copies) * shape.bytes_read < L2_BYTES and len(copies) < 12 and not part.machine.dry:
        copies.append(build_problem(shape, part.machine.device, seed=len(copies)))
    seconds = part.machine.seconds([copy.attend for copy in copies])
    part.report.add(case, "time", seconds * 1e6, "us", 15)
    part.report.add(case, "bandwidth", shape.bytes_read / seconds / 1e9, "GB/s", 15)
    part.report.add(case, "splits", problem.num_splits, "1")
    if case in WITH_RIVALS:
        measure_rivals(part, case, problem)


def measure_rivals(part: Part, case: str, problem: PagedProblem) -> None:
    """The same bytes through PyTorch's attention, contiguous; each in its own try."""

    def run(name: str, make: object) -> None:
        call = make()
        error = float((call().transpose(1, 2).flatten(0, 1).float() - problem.out.float()).norm())
        part.report.add(case, f"{name} difference", error / float(problem.out.float().norm()), "1")
        seconds = part.machine.seconds([call], rounds=5)
        part.report.add(case, f"{name} bandwidth", problem.shape.bytes_read / seconds / 1e9, "GB/s", 5)

    makers = {
        "sdpa flash": lambda: sdpa(problem, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": lambda: sdpa(problem, SDPBackend.CUDNN_ATTENTION),
        "flex": lambda: flex(problem),
    }
    if part.machine.dry:
        makers = {"sdpa math": lambda: sdpa(problem, SDPBackend.MATH)}
    for name, make in makers.items():
        part.attempt(f"{case}, {name}", lambda name=name, make=make: run(name, make))


if __name__ == "__main__":
    opened = open_part("decode")
    cases = DRY_CASES if opened.machine.dry else CASES
    for name in opened.cases(list(cases)):
        opened.attempt(name, lambda name=name: measure(opened, name, cases[name]))
        if not opened.machine.dry:
            torch.cuda.empty_cache()
