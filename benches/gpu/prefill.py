"""How fast is prefill beside FlashAttention through PyTorch, whole prompts and chunks, for each cache type?

Whole prompts have as many keys as queries, so that the rival's causal mask is the same. Left out: allocation, launch
gaps, the rivals' gathering. Run: benches/gpu/prefill.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import torch
from machine import Part, open_part
from paged_problem import PagedProblem, Shape, build_problem
from rivals import flex, sdpa
from torch.nn.attention import SDPBackend

CASES = {
    "4 prompts of 4096 bf16": Shape(((4096, 4096),) * 4),
    "1 prompt of 16384 bf16": Shape(((16384, 16384),)),
    "16 prompts of 512 bf16": Shape(((512, 512),) * 16),
    "4 prompts of 4096 fp8": Shape(((4096, 4096),) * 4, "fp8"),
    "4 prompts of 4096 int8": Shape(((4096, 4096),) * 4, "int8"),
    "4 prompts of 4096 bf16 ratio 1": Shape(((4096, 4096),) * 4, num_heads=16, num_kv_heads=16),
    "4 prompts of 4096 bf16 head 64": Shape(((4096, 4096),) * 4, head_dim=64),
    "chunk of 2048 after 30720 bf16": Shape(((2048, 32768),)),
    "chunk of 512 with 64 decodes at 4096 bf16": Shape(((512, 4096), *((1, 4096),) * 64)),
}
DRY_CASES = {
    "2 prompts of 40 bf16": Shape(((40, 40),) * 2, num_heads=4, num_kv_heads=2, head_dim=32),
    "chunk with a decode int8": Shape(((20, 50), (1, 33)), "int8", num_heads=4, num_kv_heads=2, head_dim=32),
}
WITH_RIVALS = (
    "4 prompts of 4096 bf16",
    "1 prompt of 16384 bf16",
    "16 prompts of 512 bf16",
    "4 prompts of 4096 bf16 head 64",
    "2 prompts of 40 bf16",
)


def measure(part: Part, case: str, shape: Shape) -> None:
    problem = build_problem(shape, part.machine.device)
    problem.attend()
    if part.slice is not None:
        return
    error = problem.relative_error(sorted({0, len(shape.rows) - 1}))
    part.report.add(case, "relative error", error, "1")
    if not error < 2e-2:
        raise AssertionError(f"the relative error is {error}")
    seconds = part.machine.seconds([problem.attend], rounds=9)
    part.report.add(case, "time", seconds * 1e6, "us", 9)
    part.report.add(case, "rate", shape.operations / seconds / 1e12, "TFLOP/s", 9)
    if case in WITH_RIVALS:
        measure_rivals(part, case, problem)


def measure_rivals(part: Part, case: str, problem: PagedProblem) -> None:
    """The same products through PyTorch's attention, contiguous; each in its own try."""

    def run(name: str, make: object) -> None:
        call = make()
        error = float((call().transpose(1, 2).flatten(0, 1).float() - problem.out.float()).norm())
        part.report.add(case, f"{name} difference", error / float(problem.out.float().norm()), "1")
        seconds = part.machine.seconds([call], rounds=5)
        part.report.add(case, f"{name} rate", problem.shape.operations / seconds / 1e12, "TFLOP/s", 5)

    makers = {
        "sdpa flash": lambda: sdpa(problem, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": lambda: sdpa(problem, SDPBackend.CUDNN_ATTENTION),
    }
    if case == "4 prompts of 4096 bf16":
        makers["flex"] = lambda: flex(problem)
    if part.machine.dry:
        makers = {"sdpa math": lambda: sdpa(problem, SDPBackend.MATH)}
    for name, make in makers.items():
        part.attempt(f"{case}, {name}", lambda name=name, make=make: run(name, make))


if __name__ == "__main__":
    opened = open_part("prefill")
    cases = DRY_CASES if opened.machine.dry else CASES
    for name in opened.cases(list(cases)):
        opened.attempt(name, lambda name=name: measure(opened, name, cases[name]))
        if not opened.machine.dry:
            torch.cuda.empty_cache()
