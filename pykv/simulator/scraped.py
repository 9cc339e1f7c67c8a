"""A cost model out of the metrics of our own daemon, scraped now and then while it serves.

Between two scrapes the counters tell how many steps there were and how much they computed, and the histogram of
inter-token latencies how long a step took: each running sequence gets a token in it. A cost model is linear, so that
means of an interval obey it as single steps do; but steps with many sequences weigh more in these latencies.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykv.errors import ConfigError, TraceError
from pykv.extras import needs_extra
from pykv.simulator.cost import CostModel

__all__ = ["ScrapeFit", "fit_scrapes"]

PREFIX = "pykv:"
COUNTED = (
    "engine_steps_total",
    "generation_tokens_total",
    "prompt_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "kv_tokens_held",
)
PARTS = ("fixed", "per_sequence", "per_token", "per_context_token")
LEAST_INTERVALS = 8


@dataclass(frozen=True, slots=True)
class ScrapeFit:
    """A fitted model and how far it is off: it is fitted to every other interval, the errors are of those in between.

    Attributes:
        cost_model: what was fitted.
        num_intervals: between two scrapes, in which there were steps and nobody was preempted.
        step_error_p50, step_error_p90: of the mean seconds of a step, relative: half and nine tenths are below.
        step_seconds: the least and the largest mean that was measured: beyond them the model was not tried.
    """

    cost_model: CostModel
    num_intervals: int
    step_error_p50: float
    step_error_p90: float
    step_seconds: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        return dataclasses.asdict(self)


def fit_scrapes(paths: Sequence[str | os.PathLike[str]]) -> ScrapeFit:
    """Fits the linear cost model to scrapes of one daemon, a file each, in any order.

    Raises:
        ConfigError: there are too few intervals in which the daemon had work.
        MissingExtraError: prometheus-client is not installed.
        TraceError: a file is no scrape of our daemon, or the scrapes are of several daemons or models.
        OSError: a file cannot be read.
    """
    scrapes = sorted((_scrape(Path(path)) for path in paths), key=lambda scrape: scrape["engine_steps_total"])
    rows, seconds = [], []
    for before, after in itertools.pairwise(scrapes):
        grown = {name: after[name] - before[name] for name in COUNTED}
        if min(grown[name] for name in COUNTED if name != "kv_tokens_held") < 0:
            raise TraceError("the scrapes are not of one daemon: a counter falls while its steps go on")
        gaps = grown["inter_token_latency_seconds_count"]
        if not grown["engine_steps_total"] or not gaps or grown["num_preemptions_total"]:
            continue
        rows.append(_mean_step(grown, (before["kv_tokens_held"] + after["kv_tokens_held"]) / 2))
        seconds.append(grown["inter_token_latency_seconds_sum"] / gaps)
    if len(rows) < LEAST_INTERVALS:
        raise ConfigError(
            f"{len(paths)} scrapes have {len(rows)} intervals with steps and without preemption: allowed are at least "
            f"{LEAST_INTERVALS}"
        )
    steps, measured = np.array(rows), np.array(seconds)
    parts = _least_squares(steps[::2], measured[::2])
    errors = np.abs(steps[1::2] @ parts / measured[1::2] - 1)
    values = {name: float(f"{part:.6g}") for name, part in zip(PARTS, parts, strict=True)}
    return ScrapeFit(
        cost_model=CostModel(**values),  # type: ignore[arg-type]
        num_intervals=len(rows),
        step_error_p50=float(np.median(errors)),
        step_error_p90=float(np.percentile(errors, 90)),
        step_seconds=(float(measured.min()), float(measured.max())),
    )


def _mean_step(grown: dict[str, float], context: float) -> list[float]:
    """What a step had on average: itself, sequences, tokens, tokens of context."""
    steps, sampled = grown["engine_steps_total"], grown["generation_tokens_total"]
    # Lookups are counted when a prompt starts; where nothing is looked up, prompts are counted when they end.
    looked_up = grown["prefix_cache_queries_total"] - grown["prefix_cache_hits_total"]
    prompts = looked_up if grown["prefix_cache_queries_total"] else grown["prompt_tokens_total"]
    return [1.0, sampled / steps, (sampled + prompts) / steps, context]


def _least_squares(steps: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The parts, none below 0, with the least squares of relative errors, whichever of them are 0."""
    scaled = steps / seconds[:, None]
    best, least = np.zeros(len(PARTS)), float("inf")
    for size in range(1, len(PARTS) + 1):
        for chosen in itertools.combinations(range(len(PARTS)), size):
            columns = scaled[:, chosen]
            norms = np.sqrt((columns**2).sum(axis=0))
            norms[norms == 0] = 1.0
            some, *_ = np.linalg.lstsq(columns / norms, np.ones(len(scaled)), rcond=None)
            parts = np.zeros(len(PARTS))
            parts[list(chosen)] = some / norms
            rest = float(((scaled @ parts - 1) ** 2).sum())
            if (parts >= 0).all() and rest < least:
                best, least = parts, rest
    return best


def _scrape(path: Path) -> dict[str, float]:
    """The numbers of one scrape.

    Raises:
        TraceError: one is missing, or there are those of several models.
    """
    with needs_extra("a fit of scraped metrics", "serve"):
        from prometheus_client.parser import text_string_to_metric_families
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(path.read_text()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.value)
    except (ValueError, KeyError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise TraceError(f"{path}: is no scrape of metrics: {error}") from error
    numbers = {}
    for name in COUNTED:
        values = found.get(PREFIX + name, [])
        if len(values) != 1 or not 0 <= values[0] < float("inf"):
            shown = values[0] if len(values) == 1 else f"there {len(values)} times"
            raise TraceError(
                f"{path}: {PREFIX}{name} is {shown}: allowed is one number, of the daemon's model"
            )
        numbers[name] = values[0]
    return numbers
