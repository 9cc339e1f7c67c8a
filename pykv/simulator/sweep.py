"""Many replays of one trace, on all cores."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pykv.errors import ConfigError
from pykv.simulator.replay import Replayer
from pykv.simulator.result import ReplayResult
from pykv.simulator.trace import Trace

__all__ = ["SweepPoint", "sweep"]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One replay of a sweep.

    Attributes:
        options: what was varied.
        result: what came of it.
    """

    options: Mapping[str, Any]
    result: ReplayResult


def sweep(
    trace: Trace,
    grid: Mapping[str, Sequence[Any]],
    *,
    options: Mapping[str, Any] | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[SweepPoint]:
    """Replays a trace under every combination of some options.

    The compiled core runs without the interpreter's lock, so threads use all cores.

    Args:
        trace: what is replayed.
        grid: option: its values.
        options: those that are the same in each replay.
        on_done: told after each replay how many are done, and of how many.

    Returns:
        A point for each combination, the last option varying fastest.

    Raises:
        ConfigError: an option is unknown or its value is not allowed.
    """
    if not grid or not all(grid.values()):
        raise ConfigError("sweep: at least one option with at least one value is needed")
    replayer = Replayer(trace)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    # A policy in Python has a state: each replay gets its own, as it is before the first.
    runs = [copy.deepcopy({**(options or {}), **point}) for point in points]
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        running = pool.map(lambda run: replayer.run(**run), runs)
        results = list(_told(running, len(points), on_done))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, the rest is of no use
    return [SweepPoint(point, result) for point, result in zip(points, results, strict=True)]


def _told(
    results: Iterator[ReplayResult], total: int, on_done: Callable[[int, int], None]
) -> Iterator[ReplayResult]:
    for done, result in enumerate(results, start=1):
        on_done(done, total)
        yield result
