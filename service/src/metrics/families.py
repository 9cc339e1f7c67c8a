"""Every metric of the engine: each is read from one snapshot when it is asked for, so none can drift.

Names and units are vLLM's where vLLM has the metric, so that its dashboards fit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pykv.engine.histogram import HistogramCounts
from pykv.engine.stats import EngineStats
from pykv.engine.timing import TimingCounts
from pykv.service.served import ModelDescription

__all__ = ["counted_families", "description_families", "timed_families"]

Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Count:
    """One gauge or counter, with at most one label of its own.

    Attributes:
        name: without a prefix; counters get `_total`.
        text: says what is counted, in what unit.
        read: of a snapshot; with a label, a value for each of its values.
        label: the label's name; "" = none.
        is_gauge: whether it can fall.
        is_vllm: whether vLLM has it too.
    """

    name: str
    text: str
    read: Callable[[EngineStats], float | Mapping[str, float]]
    label: str = ""
    is_gauge: bool = False
    is_vllm: bool = False

    def family(self, prefix: str, stats: EngineStats, model: str) -> Metric:
        """The metric with its values."""
        kind = GaugeMetricFamily if self.is_gauge else CounterMetricFamily
        labels = ["model_name", self.label] if self.label else ["model_name"]
        family = kind(prefix + self.name, self.text, labels=labels)
        value = self.read(stats)
        for label, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([model, label][: len(labels)], number)
        return family


@dataclass(frozen=True, slots=True)
class Times:
    """One histogram; with a label, one a value of it."""

    name: str
    text: str
    read: Callable[[TimingCounts], Mapping[str, HistogramCounts]]
    label: str = ""
    is_vllm: bool = True

    def family(self, prefix: str, timing: TimingCounts, model: str) -> Metric:
        """The metric with its values."""
        labels = ["model_name", self.label] if self.label else ["model_name"]
        family = HistogramMetricFamily(prefix + self.name, self.text, labels=labels)
        for label, counts in self.read(timing).items():
            family.add_metric([model, label][: len(labels)], _buckets(counts), counts.total)
        return family


def _usage(stats: EngineStats) -> float:
    return stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0


COUNTS = (
    Count(
        "num_requests_running",
        "Sequences that run.",
        lambda stats: stats.num_running,
        is_gauge=True,
        is_vllm=True,
    ),
    Count(
        "num_requests_waiting",
        "Sequences that wait for a place.",
        lambda stats: stats.num_waiting,
        is_gauge=True,
        is_vllm=True,
    ),
    Count(
        "num_requests_paused",
        "Sequences that take no steps because their clients do not read.",
        lambda stats: stats.num_paused,
        is_gauge=True,
    ),
    Count("request_pauses", "How often a request waited for its client.", lambda stats: stats.num_pauses),
    Count(
        "num_live_requests",
        "Requests that have not ended.",
        lambda stats: stats.num_live_requests,
        is_gauge=True,
    ),
    Count(
        "kv_cache_usage_perc",
        "Share of the blocks that requests hold, from 0 to 1.",
        _usage,
        is_gauge=True,
        is_vllm=True,
    ),
    Count(
        "kv_blocks",
        "Blocks by state: free, cached (idle, may be hit), active (held).",
        lambda stats: {
            "free": stats.blocks_free,
            "cached": stats.blocks_cached,
            "active": stats.blocks_active,
        },
        label="state",
        is_gauge=True,
    ),
    Count(
        "kv_tokens_held",
        "Slots of active blocks that hold a token.",
        lambda stats: stats.tokens_held,
        is_gauge=True,
    ),
    Count(
        "host_kv_blocks",
        "Blocks of the host's pool for preempted sequences, by state.",
        lambda stats: {
            "free": stats.host_blocks_free,
            "used": stats.host_blocks_total - stats.host_blocks_free,
        },
        label="state",
        is_gauge=True,
    ),
    Count(
        "prefix_cache_queries",
        "Prompt tokens that were looked for in the cache.",
        lambda stats: stats.prefix_queried_tokens,
        is_vllm=True,
    ),
    Count(
        "prefix_cache_hits",
        "Prompt tokens that were found in the cache.",
        lambda stats: stats.prefix_hit_tokens,
        is_vllm=True,
    ),
    Count(
        "num_preemptions",
        "How often a sequence lost its blocks to others.",
        lambda stats: stats.preemptions,
        is_vllm=True,
    ),
    Count(
        "recomputed_tokens",
        "Tokens computed again after preemptions.",
        lambda stats: stats.recomputed_tokens,
    ),
    Count(
        "swapped_blocks",
        "Blocks copied to the host and back because of preemptions.",
        lambda stats: {"out": stats.swapped_out_blocks, "in": stats.swapped_in_blocks},
        label="direction",
    ),
    Count("evicted_blocks", "Idle cached blocks that made room for others.", lambda stats: stats.evictions),
    Count("engine_steps", "Steps of the engine.", lambda stats: stats.num_steps),
    Count("requests", "Requests that were taken.", lambda stats: stats.num_requests),
    Count(
        "prompt_tokens",
        "Prompt tokens of requests that have ended.",
        lambda stats: stats.num_prompt_tokens,
        is_vllm=True,
    ),
    Count(
        "request_success",
        "Sequences that have ended, by finish reason.",
        lambda stats: {
            reason: stats.num_finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")
        },
        label="finished_reason",
        is_vllm=True,
    ),
)

TIMES = (
    Times(
        "time_to_first_token_seconds",
        "From a request's arrival in the engine to a sample's first token.",
        lambda timing: {"": timing.time_to_first_token},
    ),
    Times(
        "inter_token_latency_seconds",
        "Between two tokens of one sample.",
        lambda timing: {"": timing.inter_token},
    ),
    Times(
        "request_queue_time_seconds",
        "From a request's arrival to the first step that computes for it.",
        lambda timing: {"": timing.queue_time},
    ),
    Times(
        "e2e_request_latency_seconds",
        "From a request's arrival to its end.",
        lambda timing: {"": timing.request_time},
    ),
    Times(
        "preemption_stall_seconds",
        "How long a request that was preempted stood still, by how its blocks came back.",
        lambda timing: {"recompute": timing.stalls_recompute, "swap": timing.stalls_swap},
        label="mode",
        is_vllm=False,
    ),
    Times(
        "request_prompt_tokens",
        "Prompt tokens of a request that has ended.",
        lambda timing: {"": timing.prompt_tokens},
    ),
    Times(
        "request_generation_tokens",
        "Output tokens of a request that has ended.",
        lambda timing: {"": timing.output_tokens},
    ),
)


def counted_families(stats: EngineStats, model: str, prefixes: Mapping[str, bool]) -> Iterator[Metric]:
    """The gauges and counters.

    Args:
        prefixes: each with whether it takes only what vLLM has.
    """
    for prefix, only_vllm in prefixes.items():
        for count in COUNTS:
            if count.is_vllm or not only_vllm:
                yield count.family(prefix, stats, model)


def timed_families(timing: TimingCounts, model: str, prefixes: Mapping[str, bool]) -> Iterator[Metric]:
    """The histograms, and the tokens that were made; `prefixes` as for `counted_families`."""
    for prefix, only_vllm in prefixes.items():
        tokens = CounterMetricFamily(
            f"{prefix}generation_tokens", "Tokens that were made.", labels=["model_name"]
        )
        tokens.add_metric([model], timing.num_new_tokens)
        yield tokens
        for times in TIMES:
            if times.is_vllm or not only_vllm:
                yield times.family(prefix, timing, model)


def description_families(description: ModelDescription, prefixes: Mapping[str, bool]) -> Iterator[Metric]:
    """What is served, as labels of a constant."""
    for prefix in prefixes:
        labels = {
            "block_size": str(description.block_size),
            "cache_dtype": description.kv_dtype,
            "model_name": description.name,
            "num_gpu_blocks": str(description.num_blocks),
        }
        info = GaugeMetricFamily(f"{prefix}cache_config_info", "The cache.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        yield info


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in counts.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts.counts)), strict=True))
