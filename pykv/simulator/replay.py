"""Replays a trace on the production prefix tree and scheduler, without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from pykv import _core
from pykv.errors import ConfigError
from pykv.scheduler import SchedulerConfig
from pykv.simulator.cost import DEFAULT_COST, CostModel
from pykv.simulator.policy import POLICIES, EvictionPolicy, ranking_of
from pykv.simulator.pool_size import blocks_in
from pykv.simulator.result import ReplayResult
from pykv.simulator.timed_report import timed_report
from pykv.simulator.trace import Trace, read_trace

__all__ = ["ALLOCATORS", "MAX_BLOCKS", "Replayer", "replay"]

ALLOCATORS = ("paged", "contiguous", "contiguous-exact")
MAX_BLOCKS = 2**26
"""A block takes some 70 bytes while it is replayed: more would take a machine down."""

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
        kv_bytes_per_token: float | None = None,
        kv_dtype: str | None = None,
        allocator: str = "paged",
        cost: str | CostModel | None = None,
        speed: float | None = None,
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
            kv_bytes_per_token: in 16 bit, of heads of 128 elements; with `kv_memory_bytes`. None: of the model that
                `cost` names.
            kv_dtype: what `kv_dtype` of an engine may name, scales counted; with `kv_memory_bytes`. None: "bfloat16".
            allocator: "paged"; "contiguous": one piece of `max_model_len` for each request; "contiguous-exact": one
                piece as long as prompt and output turn out.
            cost: of a step: a model, or a text for `CostModel.parse`; None: `DEFAULT_COST`.
            speed: how many times as fast requests come as the trace says; None: as it says.
            concurrency: so many requests are always there, whatever the trace says about times; None: as it says.
            knows_outputs: whether the scheduler is told each output's length beforehand.
            scheduler: options of `pykv.SchedulerConfig` but sizes; `max_model_len` is what the longest request needs,
                unless given.

        Raises:
            ConfigError: an option is unknown, its value is not allowed, or it contradicts another.
        """
        if unknown := sorted(set(scheduler) - SCHEDULER_OPTIONS):
            raise ConfigError(
                f"{unknown[0]} is unknown: known options are {', '.join(sorted(SCHEDULER_OPTIONS))}"
            )
        if serial:
            times = {"cost": cost, "speed": speed, "concurrency": concurrency}
            times |= {"knows_outputs": knows_outputs or None, **scheduler}
            times |= {"allocator": None if allocator == "paged" else allocator}
            _refuse_given(times, "with serial, which knows no time and no scheduler")
        elif concurrency is not None:
            _refuse_given({"speed": speed}, "with concurrency, which does not look at the trace's times")
        if kv_memory_bytes is None:
            _refuse_given(
                {"kv_bytes_per_token": kv_bytes_per_token, "kv_dtype": kv_dtype}, "without kv_memory_bytes"
            )
        _choose("allocator", allocator, ALLOCATORS)
        if isinstance(policy, str):
            _choose("policy", policy, POLICIES)
        elif isinstance(policy, type) or not callable(getattr(policy, "rank", None)):
            raise ConfigError(
                f"policy is {policy!r}: allowed are {', '.join(POLICIES)}, or an object with a method rank"
            )
        if cost is not None and not isinstance(cost, str | CostModel):
            raise ConfigError(f"cost is {cost!r}: allowed is a CostModel, or a text that names one")
        native = self._in_blocks_of(block_size)
        size = native.block_size
        if (num_blocks is None) == (kv_memory_bytes is None):
            raise ConfigError("num_blocks or kv_memory_bytes: exactly one of them is needed")
        if kv_memory_bytes is not None:
            num_blocks = blocks_in(
                kv_memory_bytes, size, cost=cost, bytes_per_token=kv_bytes_per_token, dtype=kv_dtype
            )
        blocks = self._num_blocks(num_blocks, native)
        name = policy if isinstance(policy, str) else type(policy).__name__
        result = partial(
            ReplayResult,
            trace=self.trace.name,
            num_requests=native.num_requests,
            block_size=size,
            num_blocks=blocks,
            policy=name,
            allocator=allocator,
            hit_rate_infinite=_rate(native.replay_infinite()),
            hit_rate_opt=_rate(native.replay_serial(blocks, "opt")),
        )
        if serial:
            hits = _replay_serial(native, blocks, policy)
            return result(
                hit_rate_blocks=_rate(hits),
                hit_rate_tokens=hits.tokens / max(1, hits.queried_tokens),
                evictions=hits.evictions,
            )
        if policy != "lru":
            raise ConfigError(f"policy is {name!r}: in virtual time allowed is 'lru'; others need serial")
        cost = DEFAULT_COST if cost is None else cost
        speed = 1.0 if speed is None else speed
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 1e-6 <= speed <= 1e6:
            raise ConfigError(f"speed is {speed!r}: allowed is a number from 1e-6 to 1e6")
        if concurrency is not None and (type(concurrency) is not int or not 1 <= concurrency <= MAX_BLOCKS):
            raise ConfigError(f"concurrency is {concurrency!r}: allowed are None and 1 to {MAX_BLOCKS}")
        config = self._config(blocks, native, allocator, scheduler)
        timed = native.replay_timed(
            config,
            CostModel.parse(cost) if isinstance(cost, str) else cost,
            allocator=allocator,
            knows_outputs=knows_outputs,
            speed=speed,
            concurrency=concurrency,
        )
        report = timed_report(timed)
        return result(
            hit_rate_blocks=report.lookups.hit_rate,
            hit_rate_tokens=sum(timed.request_column("cached_tokens")) / max(1, native.num_prompt_tokens),
            evictions=None,
            timed=report,
        )

    @cached_property
    def _natives(self) -> dict[int, _core.Trace]:
        return {self.trace.native.block_size: self.trace.native}

    def _in_blocks_of(self, block_size: int | None) -> _core.Trace:
        size = self.trace.block_size if block_size is None else block_size
        if type(size) is not int or not 1 <= size <= 65_536:
            raise ConfigError(f"block_size is {size!r}: allowed are 1 to 65536")
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
            num_blocks = int(share * (hits.queried_blocks - hits.blocks)) if 0 < share <= 1 else num_blocks
        if type(num_blocks) is not int or not 1 <= num_blocks <= MAX_BLOCKS:
            raise ConfigError(
                f"num_blocks is {num_blocks!r}: allowed are 1 to {MAX_BLOCKS}, or a share such as '10%'"
            )
        return num_blocks

    def _config(
        self, num_blocks: int, native: _core.Trace, allocator: str, options: dict[str, Any]
    ) -> SchedulerConfig:
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


def _refuse_given(options: Mapping[str, object], why: str) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)}: not allowed {why}")


def _rate(hits: _core.CacheHits) -> float:
    return hits.blocks / max(1, hits.queried_blocks)


def _replay_serial(native: _core.Trace, num_blocks: int, policy: str | EvictionPolicy) -> _core.CacheHits:
    if isinstance(policy, str):
        return native.replay_serial(num_blocks, policy)
    return native.replay_ranked(num_blocks, ranking_of(policy))
