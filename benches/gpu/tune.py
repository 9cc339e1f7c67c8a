"""Which tiles are fastest? Measures candidates on this GPU and writes the entries of its target into the table.

    benches/gpu/tune.py [--out FILE]      measures, prints the table's new entries, changes nothing
    PYKV_WRITE_TABLE=1 benches/gpu/tune.py  also writes kernels/src/tile_table.py

Each candidate is checked against float64 before it is timed; a candidate that does not compile is left out.
"""

from __future__ import annotations

import os
import pprint
from collections.abc import Callable, Iterable

import torch
from machine import ROOT, Part, open_part
from paged_problem import Shape, build_problem

from pykv.kernels import attend, tile_table
from pykv.kernels.target import current_target
from pykv.kernels.tile_config import TileConfig

DECODE_CANDIDATES = [
    (32, 4, 4),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (128, 4, 2),
    (128, 4, 3),
    (128, 8, 3),
    (64, 2, 3),
]
PREFILL_CANDIDATES = [
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 128, 8, 2),
    (128, 32, 8, 3),
    (64, 64, 4, 3),
    (128, 64, 4, 3),
]
DECODES = {
    (128, 2): Shape(((1, 8192),) * 16),
    (128, 1): Shape(((1, 8192),) * 16, "fp8"),
    (64, 2): Shape(((1, 8192),) * 16, head_dim=64),
}
PREFILLS = {
    (128, 2): Shape(((4096, 4096),) * 2),
    (128, 1): Shape(((4096, 4096),) * 2, "fp8"),
    (64, 2): Shape(((4096, 4096),) * 2, head_dim=64),
}
DRY = Shape(((1, 40), (1, 17)), num_heads=4, num_kv_heads=2, head_dim=32)
SPLITS = (1, 2, 3, 4, 6, 8, 16)


def fastest(
    part: Part,
    kind: str,
    shape: Shape,
    candidates: Iterable[tuple[int, ...]],
    build: Callable[..., TileConfig],
) -> tuple[int, ...] | None:
    """The fastest right candidate; each one's time is written down."""
    times: dict[tuple[int, ...], float] = {}
    for candidate in candidates:
        case = f"{kind} head {shape.head_dim} {shape.cache} {candidate}"

        def run(candidate: tuple[int, ...] = candidate, case: str = case) -> None:
            seconds = timed(part, shape, kind, build(candidate))
            if seconds is not None:
                times[candidate] = seconds
                part.report.add(case, "time", seconds * 1e6, "us", 9)

        part.attempt(case, run)
    return min(times, key=lambda candidate: times[candidate]) if times else None


def timed(part: Part, shape: Shape, kind: str, config: TileConfig) -> float | None:
    """One candidate on one shape; None where only the compiler's cache is filled."""
    replaced, original = f"_{kind}_config", getattr(attend, f"_{kind}_config")
    setattr(attend, replaced, lambda *arguments: config)
    try:
        problem = build_problem(shape, part.machine.device)
        problem.attend()
        if part.slice is not None:
            return None
        error = problem.relative_error([0])
        if not error < 2e-2:
            raise AssertionError(f"the relative error is {error}")
        return part.machine.seconds([problem.attend], rounds=9)
    finally:
        setattr(attend, replaced, original)


def sweep_splits(part: Part, shape: Shape) -> None:
    """How the time of a decode depends on the number of splits."""
    original = attend.part_counts
    for splits in SPLITS:

        def run(splits: int = splits) -> None:
            attend.part_counts = lambda *arguments: (splits, 0)
            problem = build_problem(shape, part.machine.device)
            problem.attend()
            if part.slice is None:
                seconds = part.machine.seconds([problem.attend], rounds=9)
                case = f"splits {len(shape.rows)} x {shape.rows[0][1]} {shape.cache}: {splits}"
                part.report.add(case, "time", seconds * 1e6, "us", 9)

        try:
            part.attempt(f"splits {splits}", run)
        finally:
            attend.part_counts = original


def rows_of(shape: Shape) -> int:
    return max(16, shape.num_heads // shape.num_kv_heads)


def table_text(decode: dict[object, object], prefill: dict[object, object]) -> str:
    """The table's module with new entries."""
    source = (ROOT / "kernels" / "src" / "tile_table.py").read_text()
    head = source[: source.index("# (tile, num_warps, num_stages)")]
    key = "dict[tuple[str, int, int], tuple[int, int, int"
    parts = [
        f"# (tile, num_warps, num_stages)\nDECODE: {key}]] = " + pprint.pformat(decode, sort_dicts=False),
        f"# (rows, tile, num_warps, num_stages)\nPREFILL: {key}, int]] = "
        + pprint.pformat(prefill, sort_dicts=False),
    ]
    return head + "\n\n".join(parts) + "\n"


def main(part: Part) -> None:
    target = current_target(torch.device(part.machine.device)).name
    decodes, prefills = ({(32, 2): DRY}, {}) if part.machine.dry else (DECODES, PREFILLS)
    decode, prefill = dict(tile_table.DECODE), dict(tile_table.PREFILL)
    jobs: list[Callable[[], None]] = []
    for key, shape in decodes.items():

        def tune_decode(key: tuple[int, int] = key, shape: Shape = shape) -> None:
            candidates = DECODE_CANDIDATES[:1] if part.machine.dry else DECODE_CANDIDATES
            best = fastest(
                part, "decode", shape, candidates, lambda choice: TileConfig(rows_of(shape), *choice)
            )
            if best is not None:
                decode[target, *key] = best
                part.report.add(f"decode {key}", "fastest", list(best), "tile, warps, stages")

        jobs.append(tune_decode)
    for key, shape in prefills.items():

        def tune_prefill(key: tuple[int, int] = key, shape: Shape = shape) -> None:
            best = fastest(part, "prefill", shape, PREFILL_CANDIDATES, lambda choice: TileConfig(*choice))
            if best is not None:
                prefill[target, *key] = best
                part.report.add(f"prefill {key}", "fastest", list(best), "rows, tile, warps, stages")

        jobs.append(tune_prefill)
    if not part.machine.dry:
        jobs += [
            lambda shape=shape: sweep_splits(part, shape) for shape in (DECODES[128, 2], Shape(((1, 4096),)))
        ]
    for job in part.cases([str(index) for index in range(len(jobs))]):
        jobs[int(job)]()
    text = table_text(decode, prefill)
    if part.slice is None:
        part.report.add("tile_table.py", "new text", text, "python")
    if os.environ.get("PYKV_WRITE_TABLE") and not part.machine.dry:
        (ROOT / "kernels" / "src" / "tile_table.py").write_text(text)


if __name__ == "__main__":
    main(open_part("tune"))
