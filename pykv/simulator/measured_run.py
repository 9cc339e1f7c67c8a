"""A run of an engine that was measured: when each request was served, and the use of the pool each second."""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykv.errors import TraceError
from pykv.field_checks import shown
from pykv.simulator.formats.rows import Line, integer, number
from pykv.simulator.trace import Trace, read_lines, read_trace

__all__ = ["MeasuredRun", "read_measured_run"]

REQUESTS = ".requests.jsonl"
MAX_COUNT = 2**30


@dataclass(frozen=True)
class MeasuredRun:
    """What was measured. Requests are in the order of their arrival, times in seconds.

    Attributes:
        trace: the requests.
        arrivals: [num_requests], the first at 0.
        output_tokens: [num_requests].
        ttft: [num_requests], from the arrival to the first token.
        latency: [num_requests], from the arrival to the last token.
        sample_times: [num_samples], since the first arrival.
        kv_usage: [num_samples], share of the pool; empty: it was not measured.
        running: [num_samples], requests.
        num_blocks: usable blocks of the pool; None: unknown.
        block_size: tokens a block.
        max_num_seqs, max_num_batched_tokens: limits of its scheduler.
    """

    trace: Trace
    arrivals: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    ttft: NDArray[np.float64]
    latency: NDArray[np.float64]
    sample_times: NDArray[np.float64]
    kv_usage: NDArray[np.float64]
    running: NDArray[np.float64]
    num_blocks: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def read_measured_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """Reads a run of vLLM: `NAME.requests.jsonl` or `.jsonl.gz`, and what lies beside it of the same name.

    Beside it may lie `NAME.meta.json` (`engine_kwargs`, `kv_cache`) and `NAME.timeseries.csv` (`t`, `running`,
    `kv_cache_pct`); what is missing is taken as vLLM's defaults, or as not measured.

    Raises:
        TraceError: a file is malformed; the message names the line and the field.
        OSError: the file cannot be read.
    """
    path = Path(path)
    rows = [_times(row, line) for line, row in read_lines(path)]
    if not rows:
        raise TraceError(f"{path}: holds no request")
    arrival, outputs, queued, first, last = np.array(rows).T
    order = np.argsort(arrival, kind="stable")
    name = path.name.partition(REQUESTS)[0]
    meta_path = path.with_name(f"{name}.meta.json")
    meta = _meta(meta_path)
    kwargs, cache = _part(meta, "engine_kwargs", meta_path), _part(meta, "kv_cache", meta_path)
    series = _series(path.with_name(f"{name}.timeseries.csv"))
    kv_usage = series[:, 2] / 100
    blocks = _count(cache, "num_gpu_blocks", meta_path)
    return MeasuredRun(
        trace=read_trace(path),
        arrivals=arrival[order] - arrival.min(),
        output_tokens=outputs[order],
        ttft=(first - queued)[order],
        latency=(last - queued)[order],
        sample_times=series[:, 0],
        kv_usage=kv_usage if kv_usage.any() else kv_usage[:0],
        running=series[:, 1],
        num_blocks=None if blocks is None else blocks - 1,
        block_size=_count(cache, "block_size", meta_path) or 16,
        max_num_seqs=_count(kwargs, "max_num_seqs", meta_path) or 256,
        max_num_batched_tokens=_count(kwargs, "max_num_batched_tokens", meta_path) or 2048,
    )


def _times(row: dict[str, Any], line: Line) -> tuple[float, float, float, float, float]:
    arrival, outputs = number(row, "arrival_time", line), integer(row, "output_toks", line)
    queued = number(row, "queued_ts", line)
    first, last = number(row, "first_token_ts", line), number(row, "last_token_ts", line)
    if not queued <= first <= last:
        raise line.error("queued_ts, first_token_ts, last_token_ts: allowed are times that do not go back")
    return arrival, outputs, queued, first, last


def _meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise TraceError(f"{path}: is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise TraceError(f"{path}: is {str(meta)[:60]}: allowed is a JSON object")
    return meta


def _part(meta: dict[str, Any], field: str, path: Path) -> dict[str, Any]:
    part = meta.get(field) or {}
    if not isinstance(part, dict):
        raise TraceError(f"{path}: {field} is {str(part)[:60]}: allowed is a JSON object")
    return part


def _count(part: dict[str, Any], field: str, path: Path) -> int | None:
    value = part.get(field)
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_COUNT):
        raise TraceError(f"{path}: {field} is {str(value)[:60]}: allowed is null or 1 to {MAX_COUNT}")
    return value


def _series(path: Path) -> NDArray[np.float64]:
    """[num_samples, 3]: time, running requests, percent of the pool."""
    if not path.is_file():
        return np.zeros((0, 3))
    with path.open(newline="") as file:
        try:
            rows = [
                _sample(row, Line(str(path), place))
                for place, row in enumerate(csv.DictReader(file), start=2)
            ]
        except (csv.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{path}: is no CSV: {error}") from error
    return np.array(rows, np.float64).reshape(-1, 3)


def _sample(row: dict[str, Any], line: Line) -> list[float]:
    values = []
    for field in ("t", "running", "kv_cache_pct"):
        try:
            value = float(row[field])
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise line.error(f"{field} is {shown(row.get(field))}: allowed is a finite number")
        values.append(value)
    return values
