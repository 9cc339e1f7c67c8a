"""How long does one small decode take: in a CUDA graph (device time), and launched by the host (the host's time)?

Every round visits several sequences, so that memory serves it and not the second-level cache.
Run: benches/gpu/latency.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

from machine import Part, open_part
from paged_problem import PagedProblem, Shape, build_problem

import pykv

CASES = {
    "batch 1 context 4096 bf16": Shape(((1, 4096),)),
    "batch 1 context 4096 fp8": Shape(((1, 4096),), "fp8"),
    "batch 1 context 512 bf16": Shape(((1, 512),)),
    "batch 4 context 1024 bf16": Shape(((1, 1024),) * 4),
}
DRY_CASES = {"batch 1 context 40 bf16": Shape(((1, 40),), num_heads=4, num_kv_heads=2, head_dim=32)}


def measure(part: Part, case: str, shape: Shape) -> None:
    problems = [build_problem(shape, part.machine.device, seed) for seed in range(1 if part.slice else 16)]
    for problem in problems:
        problem.attend()
    if part.slice is not None:
        return
    error = problems[-1].relative_error([0])
    part.report.add(case, "relative error", error, "1")
    if not error < 2e-2:
        raise AssertionError(f"the relative error is {error}")
    seconds = part.machine.seconds([problem.attend for problem in problems], rounds=31)
    part.report.add(case, "time in a graph", seconds * 1e6, "us", 31)
    part.report.add(case, "splits", problems[0].num_splits, "1")
    part.report.add(
        case, "operator on the host", part.machine.eager_seconds(problems[0].attend) * 1e6, "us", 50
    )
    if shape.cache == "bf16":
        host = part.machine.eager_seconds(lambda: public_call(problems[0]))
        part.report.add(case, "pykv.paged_attention on the host", host * 1e6, "us", 50)


def public_call(problem: PagedProblem) -> None:
    """Through the public function, checks included."""
    pykv.paged_attention(
        problem.query,
        problem.caches.key,
        problem.caches.value,
        block_tables=problem.batch.block_tables,
        seq_lens=problem.batch.seq_lens,
        query_starts=problem.batch.query_starts,
        out=problem.out,
        backend="triton",
    )


def replay_another_step(part: Part) -> None:
    """A captured step, replayed with other queries, other lengths and a padding row, is the step it should be."""
    for rows in (((1, 900), (1, 300), (1, 600)), ((5, 900), (1, 300), (70, 600))):
        problem = build_problem(Shape(rows), part.machine.device)
        graph = part.machine.captured([problem.attend])
        problem.query.normal_()
        problem.batch.seq_lens[1] = 0
        problem.out.fill_(float("nan"))
        graph.replay()
        case = f"replay of {len(problem.query)} tokens"
        part.report.add(case, "relative error", problem.relative_error([0, 2]), "1")
        padding = problem.out[problem.batch.query_starts[1] : problem.batch.query_starts[2]]
        part.report.add(case, "equal", bool((padding == 0).all()), "bool")


if __name__ == "__main__":
    opened = open_part("latency")
    cases = DRY_CASES if opened.machine.dry else CASES
    for name in opened.cases(list(cases)):
        opened.attempt(name, lambda name=name: measure(opened, name, cases[name]))
    if not opened.machine.dry and opened.slice is None:
        opened.attempt("replay", lambda: replay_another_step(opened))
