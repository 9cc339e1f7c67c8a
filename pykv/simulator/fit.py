"""A cost model out of a measured run: the one under which a replay comes closest to what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_integer, optional
from pykv.scheduler import SchedulerConfig
from pykv.simulator.cost import CostModel
from pykv.simulator.measured_run import MeasuredRun
from pykv.simulator.options import MAX_BLOCKS

__all__ = ["FitReport", "fit"]

FIRST_GUESS = (2e-2, 1e-4, 1e-4, 1e-7)
"""Seconds: of a step, a sequence, a token, a token of context."""
FIRST_STEP, LAST_STEP = 0.5, 0.002
"""Of the search, in the logarithm of each part."""
SHORTEST_SECONDS = 0.01
"""Times below this count as this: a queue of no time has no relative error."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fitted model and how far it is off. Errors are relative: 0.05 is 5 %.

    The model is fitted to every other request; all errors but the last three are of those in between.

    Attributes:
        cost_model: what was fitted.
        num_requests: of the run.
        latency_median_error: of the median latency, predicted against measured.
        ttft_median_error: of the median time to first token.
        tpot_median_error: of the median time per output token.
        request_error_p50, request_error_p90: of each request's latency, half and nine tenths are below.
        duration_error: of the whole run.
        kv_usage_error: mean distance of the curves of KV use, as a share of the pool; None: it was not measured.
        worst_seconds: when the curves of KV use, or else of running requests, are furthest apart.
        worst_distance: how far then, as a share of the pool, or else of the most that ran; None: nothing to compare.
    """

    cost_model: CostModel
    num_requests: int
    latency_median_error: float
    ttft_median_error: float
    tpot_median_error: float
    request_error_p50: float
    request_error_p90: float
    duration_error: float
    kv_usage_error: float | None
    worst_seconds: float | None
    worst_distance: float | None

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Prediction:
    ttft: NDArray[np.float64]
    latency: NDArray[np.float64]
    duration: float
    times: NDArray[np.float64]
    kv_usage: NDArray[np.float64]
    running: NDArray[np.float64]


def fit(run: MeasuredRun, *, num_blocks: int | None = None) -> FitReport:
    """Fits the linear cost model to a measured run, by replaying the run under many models.

    The scheduler admits as vLLM does: first come first served, when the prompt's blocks are there.

    Args:
        run: what was measured.
        num_blocks: usable blocks of the pool, where the run does not say; None: memory never runs out.

    Raises:
        ConfigError: `num_blocks` is not allowed, or the run has fewer than 4 requests.
    """
    if run.trace.num_requests < 4:
        raise ConfigError(f"the run has {run.trace.num_requests} requests: allowed are at least 4")
    num_blocks = optional(as_integer, "num_blocks", num_blocks, 1, MAX_BLOCKS, ConfigError)
    native = run.trace.native.with_block_size(run.block_size)
    blocks = num_blocks or run.num_blocks or _blocks_of_all(run, native)
    config = SchedulerConfig(
        num_blocks=blocks + 1,
        block_size=run.block_size,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_model_len=native.longest_request + 1,
        watermark=0.0,
        admission="watermark",
        enable_prefix_caching=False,
        max_queued_requests=2**30,
    )

    def predict(parts: NDArray[np.float64]) -> _Prediction:
        return _predict(native, config, _model(parts))

    def distance(parts: NDArray[np.float64]) -> float:
        return _distance(predict(parts), run, slice(None, None, 2))

    parts = _search(distance, np.log(FIRST_GUESS))
    return _report(run, _model(parts), predict(parts))


def _blocks_of_all(run: MeasuredRun, native: _core.Trace) -> int:
    """Blocks that hold all requests at once: memory never runs out."""
    tokens = native.num_prompt_tokens + int(run.output_tokens.sum())
    return tokens // run.block_size + 2 * native.num_requests


def _model(parts: NDArray[np.float64]) -> CostModel:
    """Rounded, so that a last bit of the search changes nothing."""
    fixed, per_sequence, per_token, per_context_token = (float(f"{part:.6g}") for part in np.exp(parts))
    return CostModel(
        fixed=fixed, per_sequence=per_sequence, per_token=per_token, per_context_token=per_context_token
    )


def _search(
    distance: Callable[[NDArray[np.float64]], float], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Tries a step along each axis, goes on in the direction that helped, and takes smaller steps where none does.

    Source: R. Hooke and T. Jeeves, *Direct search*, Journal of the ACM 1961.
    """
    best, least, step = start, distance(start), FIRST_STEP
    while step > LAST_STEP:
        tried, found = _explore(distance, best, least, step)
        while found < least:
            direction, best, least = tried - best, tried, found
            beyond = best + direction
            tried, found = _explore(distance, beyond, distance(beyond), step)
        step /= 2
    return best


def _explore(
    distance: Callable[[NDArray[np.float64]], float], start: NDArray[np.float64], least: float, step: float
) -> tuple[NDArray[np.float64], float]:
    """The best of some points around a point, and its distance."""
    best = start
    for axis in range(len(start)):
        for sign in (1, -1):
            tried = best.copy()
            tried[axis] += sign * step
            if (found := distance(tried)) < least:
                best, least = tried, found
                break
    return best, least


def _predict(native: _core.Trace, config: SchedulerConfig, model: CostModel) -> _Prediction:
    timed = native.replay_timed(
        config, model, allocator="paged", knows_outputs=False, retention="none", speed=1.0, concurrency=None
    )
    arrival, first, ended = (
        np.array(timed.request_column(name)) for name in ("arrival", "first_token", "ended")
    )
    slots = (config.num_blocks - 1) * config.block_size
    return _Prediction(
        ttft=first - arrival,
        latency=ended - arrival,
        duration=dict(timed.totals())["seconds"],
        times=np.array(timed.point_column("start")),
        kv_usage=np.array(timed.point_column("reserved_slots")) / slots,
        running=np.array(timed.point_column("running")),
    )


def _distance(prediction: _Prediction, run: MeasuredRun, some: slice) -> float:
    """Mean distance of logarithms: of latencies, their parts after the first token, and half that of those before."""
    pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64], float]] = (
        (prediction.latency, run.latency, 1.0),
        (prediction.latency - prediction.ttft, run.latency - run.ttft, 1.0),
        (prediction.ttft, run.ttft, 0.5),
    )
    return float(
        sum(weight * np.abs(_log(mine[some]) - _log(its[some])).mean() for mine, its, weight in pairs)
    )


def _log(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    logarithm: NDArray[np.float64] = np.log(np.maximum(seconds, SHORTEST_SECONDS))
    return logarithm


def _report(run: MeasuredRun, model: CostModel, prediction: _Prediction) -> FitReport:
    others = slice(1, None, 2)
    outputs = np.maximum(1, run.output_tokens - 1)
    each = np.abs(prediction.latency / np.maximum(run.latency, SHORTEST_SECONDS) - 1)[others]
    predicted, measured = _curves(run, prediction)
    apart = np.abs(predicted - measured)
    worst = int(apart.argmax()) if len(apart) else None
    return FitReport(
        cost_model=model,
        num_requests=run.trace.num_requests,
        latency_median_error=_off(prediction.latency[others], run.latency[others]),
        ttft_median_error=_off(prediction.ttft[others], run.ttft[others]),
        tpot_median_error=_off(
            ((prediction.latency - prediction.ttft) / outputs)[others],
            ((run.latency - run.ttft) / outputs)[others],
        ),
        request_error_p50=float(np.median(each)),
        request_error_p90=float(np.percentile(each, 90)),
        duration_error=prediction.duration / float((run.arrivals + run.latency).max()) - 1,
        kv_usage_error=float(apart.mean()) if len(run.kv_usage) else None,
        worst_seconds=None if worst is None else float(run.sample_times[worst]),
        worst_distance=None if worst is None else float(apart[worst]),
    )


def _curves(run: MeasuredRun, prediction: _Prediction) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """KV use, or where that was not measured running requests, predicted and measured at the same times."""
    if len(run.kv_usage):
        return np.interp(run.sample_times, prediction.times, prediction.kv_usage), run.kv_usage
    most = max(1.0, run.running.max(initial=0.0))
    return np.interp(run.sample_times, prediction.times, prediction.running) / most, run.running / most


def _off(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.median(predicted) / np.median(measured) - 1)
