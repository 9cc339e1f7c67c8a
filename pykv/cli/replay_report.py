"""What `pykv replay` prints for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pykv.simulator.result import ReplayResult, TimedReport
from pykv.simulator.sweep import SweepPoint

__all__ = ["report", "table"]

DASH = "\N{EN DASH}"
"""In the place of a number where nothing was measured."""


def table(points: Sequence[SweepPoint]) -> str:
    """A line for each replay of a sweep, below a line of headings."""
    columns = {name: [_shown(point.options[name]) for point in points] for name in points[0].options}
    if any(point.result.hit_rate_infinite > 0 for point in points):
        columns |= {"hit rate": [f"{point.result.hit_rate_blocks:.3f}" for point in points]}
        columns |= {"best": [_number(point.result.hit_rate_opt, ".3f") for point in points]}
    timed = [point.result.timed for point in points]
    if reports := [report for report in timed if report is not None]:
        columns |= {
            "TTFT p50 s": [_number(report.ttft.p50, ".3f") for report in reports],
            "TTFT p99 s": [_number(report.ttft.p99, ".3f") for report in reports],
            "TPOT p50 s": [_number(report.tpot.p50, ".4f") for report in reports],
            "tokens/s": [f"{report.output_tokens_per_second:.0f}" for report in reports],
            "at once": [f"{report.mean_running:.1f}" for report in reports],
            "waste": [_number(report.waste, ".3f") for report in reports],
            "preemptions": [str(report.preemptions) for report in reports],
        }
        if any(report.refused for report in reports):
            columns |= {"refused": [str(report.refused) for report in reports]}
        if any(report.cut for report in reports):
            columns |= {"cut": [str(report.cut) for report in reports]}
    widths = {name: max(len(name), *map(len, values)) for name, values in columns.items()}
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    aligned = ([cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True)] for row in rows)
    return "\n".join("  ".join(row) for row in aligned)


def _shown(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else type(value).__name__


def _number(value: float, form: str) -> str:
    return DASH if math.isnan(value) else format(value, form)


def report(result: ReplayResult) -> str:
    """What one replay found, a line for each kind of number."""
    lines = [
        f"{result.trace}: {result.num_requests:,} requests, {result.num_blocks:,} blocks of {result.block_size} "
        f"tokens, {result.allocator}, {result.policy}"
        + (f", told {result.retention}" if result.retention != "none" else "")
        + (f", {result.model}" if result.model else ""),
        f"hit rate        {result.hit_rate_blocks:.3f} of blocks, {result.hit_rate_tokens:.3f} of tokens",
        f"bounds          {_number(result.hit_rate_opt, '.3f')} the best choice of victims, "
        f"{result.hit_rate_infinite:.3f} a cache that forgets nothing",
    ]
    lines += [f"assumed         {words}" for words in result.assumed]
    if result.nothing_ran:
        lines[1] = f"hit rate        {DASH}"
        return "\n".join(
            [*lines, f"nothing ran     all {result.num_requests:,} requests were refused: none fits"]
        )
    if result.evictions is not None:
        lines.append(f"evictions       {result.evictions:,}")
    if result.timed is not None:
        lines += _times(result.timed)
    return "\n".join(lines)


def _times(report: TimedReport) -> list[str]:
    lookups = report.lookups
    lines = [
        f"blocks          {lookups.hit:,} found, {lookups.never_seen:,} never seen, {lookups.evicted:,} evicted, "
        f"{lookups.not_yet_computed:,} not yet computed, {lookups.last:,} last of a prompt",
        f"time            {report.seconds:,.1f} s, {report.steps:,} steps, {report.refused:,} requests refused",
        f"cut             {report.cut:,} requests at the context cap, {report.cut_tokens:,} tokens short",
        f"tiers           {report.hit_rate_device:.3f} of the prompts found on the device, "
        f"{_number(report.hit_rate_host, '.3f')} of what preemption took back from the host",
        f"throughput      {report.output_tokens_per_second:,.0f} output tokens/s; {report.computed_tokens:,} computed",
    ]
    for name, of in (
        ("TTFT", report.ttft),
        ("TPOT", report.tpot),
        ("queue", report.queue),
        ("latency", report.latency),
    ):
        p50, p90, p95, p99 = (_number(value, ".4f") for value in (of.p50, of.p90, of.p95, of.p99))
        lines.append(f"{name:<15} {p50} s p50, {p90} p90, {p95} p95, {p99} p99")
    lines += [
        f"at once         {report.mean_running:.1f} requests on average, {report.max_running} at most",
        f"memory          {100 * report.kv_usage:.1f} % in use, "
        f"{_number(100 * report.waste, '.1f')} % of what decodes keep is empty, "
        f"{100 * report.external_fragmentation:.1f} % of what is free is in too short pieces",
        f"preemptions     {report.preemptions:,} in {report.preempting_steps:,} steps: "
        f"{report.recomputed_tokens:,} tokens computed again, {report.swapped_blocks:,} blocks swapped, "
        f"{report.stalled_seconds:,.1f} s stalled",
    ]
    return lines
