"""The engine's counters and gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pykv.scheduler import SchedulerStats

if TYPE_CHECKING:
    from pykv.engine.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine has done since it was made, and what it holds now.

    Attributes:
        num_waiting, num_running: sequences; a request counts each of its samples.
        num_paused: the same of those that are paused, since nobody reads what they have made.
        num_live_requests: requests that have not ended.
        blocks_total: usable blocks = blocks_free + blocks_cached (idle, may be hit) + blocks_active (held).
        slots_allocated: slots of the active blocks.
        tokens_held: how many of these slots hold a token.
        num_steps, num_requests, num_pauses: steps that were applied, requests that were taken, pauses of requests.
        num_prompt_tokens, num_output_tokens: of the requests that have ended.
        num_finished: samples that have ended, by finish reason.
        prefix_queried_tokens, prefix_hit_tokens: prompt tokens that were looked for in the cache, and found.
        preemptions, recomputed_tokens, evictions: events, tokens, blocks.
        swapped_out_blocks, swapped_in_blocks: blocks that were copied to the host, and back.
        host_blocks_total, host_blocks_free: usable blocks of the host for preempted sequences.
        kv_bytes_per_token: that the pool stores: keys, values and scales in all layers, and what smaller groups of
            layers leave empty.
        peak_blocks_active: the most blocks that were ever active.
        peak_tokens_held: tokens in them at that moment; like the next three it is no maximum of its own, and can fall.
        peak_table_blocks, peak_table_tokens: both counted once a sequence, as if nothing had been shared.
        peak_num_sequences: those sequences; what is paused counts as long as it has its blocks.
        peak_num_running: the most sequences that ever ran at once, whenever that was.
    """

    num_waiting: int
    num_running: int
    num_paused: int
    num_live_requests: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_active: int
    slots_allocated: int
    tokens_held: int
    num_steps: int
    num_requests: int
    num_pauses: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: Mapping[str, int]
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    recomputed_tokens: int
    evictions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    host_blocks_total: int
    host_blocks_free: int
    kv_bytes_per_token: int
    peak_blocks_active: int
    peak_tokens_held: int
    peak_table_blocks: int
    peak_table_tokens: int
    peak_num_sequences: int
    peak_num_running: int


@dataclass(slots=True)
class Counters:
    """What the engine counts itself."""

    num_steps: int = 0
    num_requests: int = 0
    num_pauses: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)


def engine_stats(
    counters: Counters, scheduler: SchedulerStats, num_live_requests: int, runner: Runner
) -> EngineStats:
    """Puts the engine's counters and the scheduler's together."""
    return EngineStats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_paused=scheduler.num_paused,
        num_live_requests=num_live_requests,
        blocks_total=scheduler.blocks_total,
        blocks_free=scheduler.blocks_free,
        blocks_cached=scheduler.blocks_cached,
        blocks_active=scheduler.blocks_active,
        slots_allocated=scheduler.blocks_active * runner.block_size,
        tokens_held=scheduler.tokens_held,
        num_steps=counters.num_steps,
        num_requests=counters.num_requests,
        num_pauses=counters.num_pauses,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_finished=dict(counters.num_finished),
        prefix_queried_tokens=scheduler.prefix_queried_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        preemptions=scheduler.preemptions,
        recomputed_tokens=scheduler.recomputed_tokens,
        evictions=scheduler.evictions,
        swapped_out_blocks=scheduler.swapped_out_blocks,
        swapped_in_blocks=scheduler.swapped_in_blocks,
        host_blocks_total=scheduler.host_blocks_total,
        host_blocks_free=scheduler.host_blocks_free,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        peak_blocks_active=scheduler.peak_blocks_active,
        peak_tokens_held=scheduler.peak_tokens_held,
        peak_table_blocks=scheduler.peak_table_blocks,
        peak_table_tokens=scheduler.peak_table_tokens,
        peak_num_sequences=scheduler.peak_num_sequences,
        peak_num_running=scheduler.peak_num_running,
    )
