"""Replays a trace on the production prefix tree and scheduler, without a model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_integer, is_integer, refuse, shown
from pykv.scheduler import SchedulerConfig
from pykv.simulator.options import MAX_BLOCKS, ReplayOptions, read_replay_options
from pykv.simulator.policy import EvictionPolicy, ranking_of
from pykv.simulator.result import ReplayResult, TimedReport
from pykv.simulator.step_cost import StepCost
from pykv.simulator.timed_report import timed_report
from pykv.simulator.trace import Trace, read_trace

__all__ = ["Replayer", "replay"]


def replay(trace: str | os.PathLike[str] | Trace, **options: Any) -> ReplayResult:
    """Replays a trace in virtual time, or one request at a time.

    Args:
        trace: a file of any form that `pykv.simulator.trace.read_trace` knows, or what it gave.
        options: those of `pykv.simulator.options.ReplayOptions`, and of its scheduler, by name.

    Returns:
        Hit rates beside their two bounds; unless `serial`, also latencies, throughput and the use of memory.

    Raises:
        ConfigError: an option is unknown, its value is not allowed, or it would be ignored.
        ModelError: the files of the model that is named cannot be read.
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

    def run(self, **given: Any) -> ReplayResult:
        """Replays the trace once.

        Args:
            given: options, as for `replay`.

        Raises:
            ConfigError, ModelError: as `replay`.
        """
        options = read_replay_options(given)
        native = self._in_blocks_of(options.block_size)
        step = options.step_cost(native.block_size)
        windows = step.served is not None and step.served.has_windows
        if options.serial and windows and step.served is not None:
            raise ConfigError(
                f"model is {shown(step.served.name)}: its layers with windows need virtual time, not serial"
            )
        blocks = _num_blocks(options.pool_blocks(native.block_size, step), native, windows=windows)
        timed, evictions = None, None
        if options.serial:
            hits = _replay_serial(native, blocks, options.policy)
            evictions, rate, token_rate = (
                hits.evictions,
                _rate(hits),
                hits.tokens / max(1, hits.queried_tokens),
            )
        else:
            timed = self._replay_timed(native, blocks, step, options)
            rate, token_rate = timed.lookups.hit_rate, timed.hit_rate_device
        return ReplayResult(
            trace=self.trace.name,
            num_requests=native.num_requests,
            block_size=native.block_size,
            num_blocks=blocks,
            policy=options.policy_name,
            retention=options.retention or "none",
            allocator=options.allocator,
            model=None if step.served is None else step.served.name,
            hit_rate_blocks=rate,
            hit_rate_tokens=token_rate,
            hit_rate_infinite=_rate(native.replay_infinite()),
            # Blocks of a layer group are not blocks of the trace: the bound would say nothing.
            hit_rate_opt=math.nan if windows else _rate(native.replay_serial(blocks, "opt")),
            evictions=evictions,
            assumed=step.assumed,
            timed=timed,
        )

    def _replay_timed(
        self, native: _core.Trace, blocks: int, step: StepCost, options: ReplayOptions
    ) -> TimedReport:
        config = SchedulerConfig(
            num_blocks=blocks + 1,
            block_size=native.block_size,
            groups=(None,) if step.served is None else step.served.groups.windows,
            enable_prefix_caching=self.trace.has_blocks and options.allocator == "paged",
            eviction=options.policy_name,
            max_queued_requests=2**30,
            **{"max_model_len": native.longest_request + 1, **options.scheduler},
        )
        timed = native.replay_timed(
            config,
            step.model,
            allocator=options.allocator,
            knows_outputs=options.knows_outputs,
            retention=options.retention or "none",
            speed=1.0 if options.speed is None else options.speed,
            concurrency=options.concurrency,
        )
        return timed_report(timed, native.block_size)

    @cached_property
    def _natives(self) -> dict[int, _core.Trace]:
        return {self.trace.native.block_size: self.trace.native}

    def _in_blocks_of(self, block_size: int | None) -> _core.Trace:
        size = self.trace.block_size if block_size is None else block_size
        size = as_integer("block_size", size, 1, 65_536, ConfigError)
        if size not in self._natives:
            self._natives[size] = self.trace.native.with_block_size(size)
        return self._natives[size]


def _num_blocks(num_blocks: int | str | None, native: _core.Trace, *, windows: bool) -> int:
    """The blocks of a pool, where they may be a share of the trace's."""
    if isinstance(num_blocks, str) and num_blocks.endswith("%"):
        if windows:
            raise ConfigError(
                f"num_blocks is {shown(num_blocks)}: allowed is a number where layers have windows: a block is then of "
                "some layers only"
            )
        try:
            share = float(num_blocks[:-1]) / 100
        except ValueError:
            share = -1
        hits = native.replay_infinite()
        num_blocks = int(share * (hits.queried_blocks - hits.blocks)) if 0 < share <= 1 else num_blocks
    if not is_integer(num_blocks) or not 1 <= num_blocks <= MAX_BLOCKS:
        allowed = f"an integer from 1 to {MAX_BLOCKS}, or a share such as '10%'"
        refuse("num_blocks", num_blocks, allowed, ConfigError)
    return int(num_blocks)


def _rate(hits: _core.CacheHits) -> float:
    return hits.blocks / max(1, hits.queried_blocks)


def _replay_serial(native: _core.Trace, num_blocks: int, policy: str | EvictionPolicy) -> _core.CacheHits:
    if isinstance(policy, str):
        return native.replay_serial(num_blocks, policy)
    return native.replay_ranked(num_blocks, ranking_of(policy))
