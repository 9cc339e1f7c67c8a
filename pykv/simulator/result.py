"""What a replay found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PERCENTILES", "Lookups", "Percentiles", "ReplayResult", "TimeSeries", "TimedReport"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a number that each request has: mean, and what so many of a hundred stay below; NaN where none has it."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Lookups:
    """The blocks of all prompts, by what the lookup gave when their requests started.

    Attributes:
        hit: found.
        never_seen: nobody had asked for it before.
        evicted: computed before, and evicted since.
        not_yet_computed: another request was about to compute it.
        last: not full, or with the prompt's last token, which is always computed.
    """

    hit: int
    never_seen: int
    evicted: int
    not_yet_computed: int
    last: int

    @property
    def hit_rate(self) -> float:
        """Found, of all."""
        return self.hit / max(
            1, self.hit + self.never_seen + self.evicted + self.not_yet_computed + self.last
        )


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """Means over short times that follow each other.

    Attributes:
        start_seconds: when each began.
        kv_usage: share of the slots that running requests hold.
        cached: share of the slots of blocks that nobody uses and that can be found again.
        running, waiting: requests.
    """

    start_seconds: tuple[float, ...]
    kv_usage: tuple[float, ...]
    cached: tuple[float, ...]
    running: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TimedReport:
    """What virtual time showed. Latencies are in seconds.

    Attributes:
        seconds: until the last request had ended.
        steps: of the scheduler.
        ttft: time to first token, from the arrival.
        tpot: time per output token after the first.
        queue: from the arrival to the first step that computed something.
        latency: from the arrival to the last token.
        output_tokens_per_second: over the whole run.
        computed_tokens: prompt and output, what was computed again included.
        refused: requests that could never fit.
        cut: requests that ended at the context cap, before their output was whole.
        cut_tokens: of output that these did not get.
        hit_rate_device: tokens found in the device's cache, of all tokens of the prompts that started.
        hit_rate_host: blocks that came back from the host, of those that preempted requests needed again and did not
            find on the device; NaN: none.
        mean_running: requests that ran at once, over the time of all steps.
        max_running: at most.
        kv_usage: share of the slots that running requests held, over the time of all steps.
        waste: of the slots that decodes kept, the share that held no token; weighted by decode step; NaN: none ran.
        external_fragmentation: of the free slots, the share outside the longest free piece, over the time of all steps.
        preemptions: how often a request had to give way.
        preempting_steps: steps in which that happened.
        recomputed_tokens: computed again after it.
        swapped_blocks: copied to or from the host for it.
        swapped_in_blocks: those of them that came back.
        stalled_seconds: that requests waited to go on after it.
        lookups: the blocks of all prompts, by what the lookup gave.
        series: over time.
    """

    seconds: float
    steps: int
    ttft: Percentiles
    tpot: Percentiles
    queue: Percentiles
    latency: Percentiles
    output_tokens_per_second: float
    computed_tokens: int
    refused: int
    cut: int
    cut_tokens: int
    hit_rate_device: float
    hit_rate_host: float
    mean_running: float
    max_running: int
    kv_usage: float
    waste: float
    external_fragmentation: float
    preemptions: int
    preempting_steps: int
    recomputed_tokens: int
    swapped_blocks: int
    swapped_in_blocks: int
    stalled_seconds: float
    lookups: Lookups
    series: TimeSeries = dataclasses.field(repr=False)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A replay that has ended.

    Attributes:
        trace: its name.
        num_requests: of the trace.
        block_size: tokens a block.
        num_blocks: blocks of the pool that can hold tokens.
        policy: who makes room.
        retention: what the scheduler was told of sessions.
        allocator: how requests get their memory.
        model: what was served; None: no model was named.
        hit_rate_blocks: blocks found, of all blocks of the prompts.
        hit_rate_tokens: tokens found, of all tokens of the prompts; in virtual time of those that were not refused.
        hit_rate_infinite: blocks that a cache which forgets nothing finds, one request at a time.
        hit_rate_opt: blocks that the best choice of victims finds (Belady), one request at a time; NaN: the model's
            layers have windows, for which the bound is not known.
        evictions: cached blocks that made room; None: not counted.
        assumed: what was not given and was taken for granted, in words.
        timed: what virtual time showed; None: one request at a time was replayed.
    """

    trace: str
    num_requests: int
    block_size: int
    num_blocks: int
    policy: str
    retention: str
    allocator: str
    model: str | None
    hit_rate_blocks: float
    hit_rate_tokens: float
    hit_rate_infinite: float
    hit_rate_opt: float
    evictions: int | None
    assumed: tuple[str, ...] = ()
    timed: TimedReport | None = None

    @property
    def nothing_ran(self) -> bool:
        """Whether every request was refused, since none could ever fit: what was measured is of nothing."""
        return self.timed is not None and self.timed.refused == self.num_requests

    def to_json(self, *, with_series: bool = False) -> dict[str, Any]:
        """The numbers as one flat object, nested names joined by `_`; for `json.dumps`. What is NaN is None.

        Args:
            with_series: whether what was so over time is in it.
        """
        flat = _flat({key: value for key, value in dataclasses.asdict(self).items() if key != "timed"})
        if self.timed is not None:
            timed = dataclasses.asdict(self.timed)
            series = timed.pop("series")
            flat |= _flat(timed)
            if with_series:
                flat["series"] = series
        return flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}_") if isinstance(value, dict) else {prefix + key: _there(value)}
    return flat


def _there(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
