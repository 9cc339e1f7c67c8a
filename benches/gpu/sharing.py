"""How much faster is a decode whose rows begin alike when that is read once, and what does looking for it cost in vain?

Self against self, in turn: the same batch, reading alone and together. Both are checked against float64 first.
Run: benches/gpu/sharing.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import dataclasses

from machine import Part, open_part
from paged_problem import PagedProblem, Shape, build_problem

# name: (the batch, the keys that all rows share)
CASES = {
    "batch 32 context 8192, 7168 shared": (Shape(((1, 8192),) * 32), 7168),
    "batch 32 context 2048, 1024 shared": (Shape(((1, 2048),) * 32), 1024),
    "batch 64 context 4096, 4032 shared, fp8": (Shape(((1, 4096),) * 64, "fp8"), 4032),
    "batch 32 context 8192, nothing shared": (Shape(((1, 8192),) * 32), 0),
}
DRY_CASES = {
    "batch 3 context 300, 272 shared": (
        Shape(((1, 300),) * 3, num_heads=4, num_kv_heads=2, head_dim=32),
        272,
    ),
    "batch 2 context 70, nothing shared": (
        Shape(((1, 70),) * 2, num_heads=4, num_kv_heads=2, head_dim=32),
        0,
    ),
}


def shared_problem(shape: Shape, num_shared: int, device: str) -> PagedProblem:
    """All rows begin with the first one's blocks."""
    problem = build_problem(shape, device)
    columns = num_shared // shape.block_size
    problem.batch.block_tables[1:, :columns] = problem.batch.block_tables[0, :columns]
    return problem


def measure(part: Part, case: str, shape: Shape, num_shared: int) -> None:
    alone = shared_problem(shape, num_shared, part.machine.device)
    together = dataclasses.replace(alone, share_prefixes=True, out=alone.out.clone())
    for name, problem in (("alone", alone), ("together", together)):
        problem.attend()
        if part.slice is not None:
            continue
        error = problem.relative_error(sorted({0, len(shape.rows) - 1}))
        part.report.add(case, f"relative error, {name}", error, "1")
        if not error < 2e-2:
            raise AssertionError(f"the relative error is {error}, reading {name}")
    if part.slice is not None:
        return
    seconds = {
        name: part.machine.seconds([problem.attend])
        for name, problem in (("alone", alone), ("together", together))
    }
    for name, value in seconds.items():
        part.report.add(case, f"time, {name}", value * 1e6, "us", 15)
    part.report.add(case, "gain", seconds["alone"] / seconds["together"], "1", 15)


if __name__ == "__main__":
    opened = open_part("sharing")
    cases = DRY_CASES if opened.machine.dry else CASES
    for name in opened.cases(list(cases)):
        opened.attempt(name, lambda name=name: measure(opened, name, *cases[name]))
