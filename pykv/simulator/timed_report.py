"""What virtual time showed, out of the columns of the compiled core."""

from __future__ import annotations

import math

import numpy as np

from pykv import _core
from pykv.simulator.result import PERCENTILES, Lookups, Percentiles, TimedReport, TimeSeries

__all__ = ["timed_report"]

REQUEST_COLUMNS = (
    "arrival",
    "started",
    "first_token",
    "ended",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "stalled_seconds",
)
POINT_COLUMNS = (
    "start",
    "seconds",
    "running",
    "waiting",
    "reserved_slots",
    "cached_slots",
    "broken_slots",
)


def timed_report(timed: _core.TimedReplay, block_size: int) -> TimedReport:
    """Sums and percentiles of what the compiled core has noted."""
    totals = dict(timed.totals())
    request = {name: np.array(timed.request_column(name)) for name in REQUEST_COLUMNS}
    point = {name: np.array(timed.point_column(name)) for name in POINT_COLUMNS}
    slots = max(1.0, totals["total_slots"])
    seconds = point["seconds"]
    free = _sum((slots - point["reserved_slots"]) * seconds)
    reserved = totals["decode_reserved_slots"]
    outputs = request["output_tokens"]
    several = outputs > 1
    back, again = totals["swapped_in_blocks"], _sum(request["recomputed_tokens"]) / block_size
    return TimedReport(
        seconds=totals["seconds"],
        steps=int(totals["steps"]),
        ttft=_percentiles(request["first_token"] - request["arrival"]),
        tpot=_percentiles((request["ended"] - request["first_token"])[several] / (outputs[several] - 1)),
        queue=_percentiles(request["started"] - request["arrival"]),
        latency=_percentiles(request["ended"] - request["arrival"]),
        output_tokens_per_second=int(outputs.sum()) / max(totals["seconds"], 1e-12),
        computed_tokens=int(totals["computed_tokens"]),
        refused=int(totals["refused"]),
        cut=int(totals["cut"]),
        cut_tokens=int(totals["cut_tokens"]),
        hit_rate_device=totals["hit_tokens"] / max(1.0, totals["queried_tokens"]),
        hit_rate_host=back / (back + again) if back + again else math.nan,
        mean_running=_mean(point["running"], seconds),
        max_running=int(totals["max_running"]),
        kv_usage=_mean(point["reserved_slots"], seconds) / slots,
        waste=1 - totals["decode_held_slots"] / reserved if reserved else math.nan,
        external_fragmentation=_sum(point["broken_slots"] * seconds) / free if free > 0 else 0.0,
        preemptions=int(request["preemptions"].sum()),
        preempting_steps=int(totals["preempting_steps"]),
        recomputed_tokens=int(request["recomputed_tokens"].sum()),
        swapped_blocks=int(totals["swapped_out_blocks"] + back),
        swapped_in_blocks=int(back),
        stalled_seconds=_sum(request["stalled_seconds"]),
        lookups=Lookups(**{name: int(totals[name]) for name in Lookups.__dataclass_fields__}),
        series=TimeSeries(
            start_seconds=tuple(point["start"].tolist()),
            kv_usage=tuple((point["reserved_slots"] / slots).tolist()),
            cached=tuple((point["cached_slots"] / slots).tolist()),
            running=tuple(point["running"].tolist()),
            waiting=tuple(point["waiting"].tolist()),
        ),
    )


def _percentiles(values: np.ndarray) -> Percentiles:
    """Of those that are there: a request that was refused has none."""
    there = sorted(values[~np.isnan(values)].tolist())
    if not there:
        return Percentiles(math.nan, math.nan, math.nan, math.nan, math.nan)
    return Percentiles(
        math.fsum(there) / len(there), *(_percentile(there, percent) for percent in PERCENTILES)
    )


def _percentile(values: list[float], percent: int) -> float:
    """Between two of the sorted values, in proportion."""
    below, rest = divmod(percent * (len(values) - 1), 100)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (rest / 100)


def _mean(values: np.ndarray, seconds: np.ndarray) -> float:
    return _sum(values * seconds) / max(_sum(seconds), 1e-12)


def _sum(values: np.ndarray) -> float:
    """The exact sum, rounded once: the same on every machine, whatever its vector units."""
    return math.fsum(values.tolist())
