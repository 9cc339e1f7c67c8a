"""Replays a trace on the production prefix tree and scheduler, without a model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pykv import _core
from pykv.errors import ConfigError
from pykv.scheduler import SchedulerConfig
from pykv.simulator.cost import CostModel
from pykv.simulator.policy import POLICIES, EvictionPolicy, ranking_of
from pykv.simulator.result import (
    PERCENTILES,
    MissReasons,
    Percentiles,
    ReplayResult,
    TimedReport,
    TimeSeries,
)
from pykv.simulator.trace import Trace, read_trace

__all__ = ["ALLOCATORS", "DEFAULT_COST", "Replayer", "replay"]

ALLOCATORS = ("paged", "contiguous", "contiguous-exact")
DEFAULT_COST = "roofline:h100"
"""Llama 3.1 8B in 16 bit on one H100, at 70 % of its data sheet."""

SCHEDULER_OPTIONS = {
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_chunk_tokens",
    "max_model_len",
    "watermark",
    "admission",
    "queue_order",
    "max_passes",
    "preemption",
    "num_host_blocks",
}


def replay(trace: str | os.PathLike[str] | Trace, **options: Any) -> ReplayResult:
    """Replays a trace in virtual time, or one request at a time.

    Args:
        trace: a file of any form that `pykv.simulator.trace.read_trace` knows, or what it gave.
        options: those of `Replayer.run`.

    Returns:
        Hit rates beside their two bounds; unless `serial`, also latencies, throughput and the use of memory.

    Raises:
        ConfigError: an option is unknown or its value is not allowed.
        TraceError: the file cannot be read as a trace.

    >>> import pathlib, tempfile, pykv
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "twice.jsonl"
    >>> request = '{"ts": 0, "in": 64, "out": 8, "s": null, "h": [[0, 4]]}'
    >>> _ = path.write_text("\\n".join(['{"name": "twice", "block_size": 16}', request, request]))
    >>> pykv.replay(path, num_blocks=16, serial=True).hit_rate_blocks
    0.5
    """
    return Replayer(trace if isinstance(trace, Trace) else read_trace(trace)).run(**options)


@dataclass(frozen=True)
class Replayer:
    """A trace to be replayed more than once.

    Attributes:
        trace: what is replayed.
    """

    trace: Trace

    def run(
        self,
        *,
        num_blocks: int | str | None = None,
        serial: bool = False,
        policy: str | EvictionPolicy = "lru",
        block_size: int | None = None,
        kv_memory_bytes: int | None = None,
        kv_bytes_per_token: float = 131_072,
        kv_dtype: str = "bfloat16",
        allocator: str = "paged",
        cost: str | CostModel = DEFAULT_COST,
        speed: float = 1.0,
        concurrency: int | None = None,
        knows_outputs: bool = False,
        **scheduler: Any,
    ) -> ReplayResult:
        """Replays the trace once.

        Args:
            num_blocks: blocks that can hold tokens (a scheduler's null block comes on top); or a text such as "10%":
                that share of the trace's different blocks.
            serial: one request at a time, as a cache alone sees it; else virtual time.
            policy: who makes room: a name of `POLICIES`, or an object with a method `rank`. In virtual time "lru".
            block_size: tokens a block; None: the trace's, or 16. It must divide the trace's, if that has one.
            kv_memory_bytes: the pool's size, in the place of `num_blocks`.
            kv_bytes_per_token: in 16 bit; with `kv_memory_bytes`.
            kv_dtype: "bfloat16", "float16", "float32", "int8" or "fp8"; with `kv_memory_bytes`. Scales are not counted.
            allocator: "paged"; "contiguous": one piece of `max_model_len` for each request; "contiguous-exact": one
                piece as long as prompt and output turn out.
            cost: of a step: a model, or a text for `CostModel.parse`.
            speed: how many times as fast requests come as the trace says.
            concurrency: so many requests are always there, whatever the trace says about times; None: as it says.
            knows_outputs: whether the scheduler is told each output's length beforehand.
            scheduler: options of `pykv.SchedulerConfig` but sizes; `max_model_len` is what the longest request needs,
                unless given.

        Raises:
            ConfigError: an option is unknown or its value is not allowed.
        """
        _choose("allocator", allocator, ALLOCATORS)
        if isinstance(policy, str):
            _choose("policy", policy, POLICIES)
        native = self._in_blocks_of(block_size)
        size = native.block_size
        if (num_blocks is None) == (kv_memory_bytes is None):
            raise ConfigError("num_blocks or kv_memory_bytes: exactly one of them is needed")
        if kv_memory_bytes is not None:
            num_blocks = _blocks_in(kv_memory_bytes, kv_bytes_per_token, kv_dtype, size)
        blocks = self._num_blocks(num_blocks, native)
        infinite, best = _rate(native.replay_infinite()), _rate(native.replay_serial(blocks, "opt"))
        named = {
            "trace": self.trace.name,
            "num_requests": native.num_requests,
            "block_size": size,
            "num_blocks": blocks,
            "policy": policy if isinstance(policy, str) else type(policy).__name__,
            "allocator": allocator,
            "hit_rate_infinite": infinite,
            "hit_rate_opt": best,
        }
        if serial:
            if scheduler:
                raise ConfigError(f"{min(scheduler)} is of no use with serial")
            hits = _replay_serial(native, blocks, policy)
            return ReplayResult(
                **named,
                hit_rate_blocks=_rate(hits),
                hit_rate_tokens=hits.tokens / max(1, hits.queried_tokens),
                evictions=hits.evictions,
            )
        if policy != "lru":
            raise ConfigError(
                f"policy is {named['policy']!r}: in virtual time allowed is 'lru'; others need serial"
            )
        config = self._config(blocks, native, allocator, scheduler)
        timed = native.replay_timed(
            config,
            CostModel.parse(cost) if isinstance(cost, str) else cost,
            allocator=allocator,
            knows_outputs=knows_outputs,
            speed=speed,
            concurrency=concurrency,
        )
        return _timed_result(named, native, timed)

    @cached_property
    def _natives(self) -> dict[int, _core.Trace]:
        return {self.trace.native.block_size: self.trace.native}

    def _in_blocks_of(self, block_size: int | None) -> _core.Trace:
        size = self.trace.block_size if block_size is None else block_size
        if type(size) is not int:
            raise ConfigError(f"block_size is {size!r}: allowed is a whole number")
        if size not in self._natives:
            self._natives[size] = self.trace.native.with_block_size(size)
        return self._natives[size]

    def _num_blocks(self, num_blocks: int | str | None, native: _core.Trace) -> int:
        if isinstance(num_blocks, str) and num_blocks.endswith("%"):
            try:
                share = float(num_blocks[:-1]) / 100
            except ValueError:
                share = -1
            hits = native.replay_infinite()
            num_blocks = int(share * (hits.queried_blocks - hits.blocks)) if 0 < share <= 100 else num_blocks
        if type(num_blocks) is not int or not 1 <= num_blocks < 2**30:
            raise ConfigError(
                f"num_blocks is {num_blocks!r}: allowed are 1 to {2**30 - 1}, or a share such as '10%'"
            )
        return num_blocks

    def _config(
        self, num_blocks: int, native: _core.Trace, allocator: str, options: dict[str, Any]
    ) -> SchedulerConfig:
        if unknown := sorted(set(options) - SCHEDULER_OPTIONS):
            raise ConfigError(
                f"{unknown[0]} is unknown: known options are {', '.join(sorted(SCHEDULER_OPTIONS))}"
            )
        options.setdefault("max_model_len", native.longest_request + 1)
        return SchedulerConfig(
            num_blocks=num_blocks + 1,
            block_size=native.block_size,
            enable_prefix_caching=self.trace.has_blocks and allocator == "paged",
            max_queued_requests=2**30,
            **options,
        )


def _choose(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} is {value!r}: allowed are {', '.join(allowed)}")


def _blocks_in(memory_bytes: int, bytes_per_token: float, dtype: str, block_size: int) -> int:
    elements = {"float32": 2.0, "bfloat16": 1.0, "float16": 1.0, "int8": 0.5, "fp8": 0.5}
    _choose("kv_dtype", dtype, tuple(elements))
    if not 0 < bytes_per_token < 1e12:
        raise ConfigError(f"kv_bytes_per_token is {bytes_per_token}: allowed is above 0 and below 1e12")
    return int(memory_bytes // (bytes_per_token * elements[dtype] * block_size))


def _rate(hits: _core.CacheHits) -> float:
    return hits.blocks / max(1, hits.queried_blocks)


def _replay_serial(native: _core.Trace, num_blocks: int, policy: str | EvictionPolicy) -> _core.CacheHits:
    if isinstance(policy, str):
        return native.replay_serial(num_blocks, policy)
    return native.replay_ranked(num_blocks, ranking_of(policy))


def _timed_result(named: dict[str, Any], native: _core.Trace, timed: _core.TimedReplay) -> ReplayResult:
    totals = dict(timed.totals())
    request = {name: np.array(timed.request_column(name)) for name in _REQUEST_COLUMNS}
    point = {name: np.array(timed.point_column(name)) for name in _POINT_COLUMNS}
    misses = MissReasons(**{name: int(totals[name]) for name in MissReasons.__dataclass_fields__})
    lookups = sum(getattr(misses, name) for name in MissReasons.__dataclass_fields__)
    slots = max(1.0, totals["total_slots"])
    seconds = point["seconds"]
    free = _sum((slots - point["reserved_slots"]) * seconds)
    outputs = request["output_tokens"]
    report = TimedReport(
        seconds=totals["seconds"],
        steps=int(totals["steps"]),
        ttft=_percentiles(request["first_token"] - request["arrival"]),
        tpot=_percentiles(
            ((request["ended"] - request["first_token"])[outputs > 1]) / (outputs[outputs > 1] - 1)
        ),
        queue=_percentiles(request["started"] - request["arrival"]),
        latency=_percentiles(request["ended"] - request["arrival"]),
        output_tokens_per_second=int(outputs.sum()) / max(totals["seconds"], 1e-12),
        computed_tokens=int(totals["computed_tokens"]),
        refused=int(totals["refused"]),
        mean_running=_mean(point["running"], seconds),
        max_running=int(totals["max_running"]),
        kv_usage=_mean(point["reserved_slots"], seconds) / slots,
        waste=1 - totals["decode_held_tokens"] / max(1.0, totals["decode_reserved_slots"]),
        external_fragmentation=_sum(point["broken_slots"] * seconds) / free if free > 0 else 0.0,
        preemptions=int(request["preemptions"].sum()),
        preempting_steps=int(totals["preempting_steps"]),
        recomputed_tokens=int(request["recomputed_tokens"].sum()),
        swapped_blocks=int(totals["swapped_blocks"]),
        stalled_seconds=_sum(request["stalled_seconds"]),
        misses=misses,
        series=TimeSeries(
            start_seconds=tuple(point["start"]),
            kv_usage=tuple(point["reserved_slots"] / slots),
            cached=tuple(point["cached_slots"] / slots),
            running=tuple(point["running"]),
            waiting=tuple(point["waiting"]),
        ),
    )
    return ReplayResult(
        **named,
        hit_rate_blocks=misses.hit / max(1, lookups),
        hit_rate_tokens=int(request["cached_tokens"].sum()) / max(1, native.num_prompt_tokens),
        evictions=None,
        timed=report,
    )


_REQUEST_COLUMNS = (
    "arrival",
    "started",
    "first_token",
    "ended",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "recomputed_tokens",
    "stalled_seconds",
)
_POINT_COLUMNS = (
    "start",
    "seconds",
    "running",
    "waiting",
    "reserved_slots",
    "cached_slots",
    "broken_slots",
)


def _percentiles(values: np.ndarray) -> Percentiles:
    """Of those that are there: a request that was refused has none."""
    there = sorted(values[~np.isnan(values)].tolist())
    if not there:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    return Percentiles(
        math.fsum(there) / len(there), *(_percentile(there, percent) for percent in PERCENTILES)
    )


def _percentile(values: list[float], percent: int) -> float:
    """Between two of the sorted values, in proportion."""
    place = percent * (len(values) - 1)
    below, rest = divmod(place, 100)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (rest / 100)


def _mean(values: np.ndarray, seconds: np.ndarray) -> float:
    return _sum(values * seconds) / max(_sum(seconds), 1e-12)


def _sum(values: np.ndarray) -> float:
    """The exact sum, rounded once: the same on every machine, whatever its vector units."""
    return math.fsum(values.tolist())
