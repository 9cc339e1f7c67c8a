"""One set of options, evaluated: the pool that it leaves and the requests that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pykv.layout import KvLayout
from pykv.planner.capacity import Mix, Pool, requests_of_mix, requests_that_fit
from pykv.planner.checks import refused
from pykv.planner.engine_storage import PREFILL_TOKENS, EngineStorage
from pykv.planner.footprint import Footprint, layer_groups
from pykv.planner.lengths import LengthDistribution
from pykv.planner.memory import GpuMemory, KvBudget, kv_budget
from pykv.planner.model_facts import ModelFacts
from pykv.planner.options import PlanOptions
from pykv.planner.sizes import show_bytes
from pykv.planner.tensor_parallel import check_ranks, layout_of_rank

__all__ = ["PERCENTILES", "Evaluation", "context_cap", "evaluate", "request_lengths", "whole_footprint"]

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
LARGEST_REQUEST_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one set of options gives.

    Attributes:
        rank: what requests take in one rank's pool.
        budget: how a rank's memory is parted; None: no memory was given.
        num_blocks: of one engine's pool, the null block included; None: neither memory nor blocks were given.
        usable_bytes: of one rank's blocks but the null block.
        requests: by length ("p50", …, "cap", "mix"), on all replicas together; None: as for num_blocks.
        mix: how the mix of one engine was found.
        rows_bind: the lengths at which max_num_seqs holds the requests back.
    """

    rank: Footprint
    budget: KvBudget | None
    num_blocks: int | None
    usable_bytes: int | None
    requests: dict[str, int] | None
    mix: Mix | None
    rows_bind: tuple[str, ...] = ()


def evaluate(options: PlanOptions, facts: ModelFacts) -> Evaluation:
    """Evaluates the options.

    Raises:
        ConfigError: the ranks do not divide the heads, weights leave no room for two blocks, or a request would be
            larger than any memory.
    """
    rank = _rank_footprint(options, facts)
    budget = _budget(options, facts)
    lengths, cap = request_lengths(options, facts), context_cap(options, facts)
    _check_size(rank, max(cap or 1, 1 if lengths is None else int(lengths.tokens[-1])))
    kv = None if budget is None else budget.kv
    if kv is None and options.num_blocks is not None:
        kv = options.num_blocks * rank.block_bytes
    if kv is None:
        return Evaluation(rank=rank, budget=None, num_blocks=None, usable_bytes=None, requests=None, mix=None)
    num_blocks, usable = _blocks(rank, kv)
    pool = Pool(usable, _untouched(options, rank, num_blocks), _unit(rank))
    each, mix = _requests(options, rank, pool, lengths, cap)
    if rank.state_bytes:
        num_blocks = max(0, kv - each.get("p50", 0) * rank.state_bytes) // max(1, rank.block_bytes)
    rows = options.max_num_seqs
    bind = () if rows is None else tuple(name for name, number in each.items() if number > rows)
    fleet = {
        name: options.num_replicas * (number if rows is None else min(number, rows))
        for name, number in each.items()
    }
    return Evaluation(
        rank=rank,
        budget=budget,
        num_blocks=num_blocks,
        usable_bytes=usable,
        requests=fleet,
        mix=mix,
        rows_bind=bind,
    )


def context_cap(options: PlanOptions, facts: ModelFacts) -> int | None:
    """The most tokens of a request; None: neither given nor known."""
    return options.max_model_len or facts.max_positions


def request_lengths(options: PlanOptions, facts: ModelFacts) -> LengthDistribution | None:
    """The lengths of requests, none beyond the cap. Where none were given every request is as long as the cap."""
    cap = context_cap(options, facts)
    if options.lengths is not None:
        return options.lengths if cap is None else options.lengths.capped(cap)
    if cap is None:
        return None
    return LengthDistribution(
        np.array([cap], np.int64), np.array([1], np.int64), f"{cap:,} tokens each, the cap"
    )


def whole_footprint(options: PlanOptions, facts: ModelFacts) -> Footprint:
    """What requests take on all ranks of an engine together, if nothing is held by several."""
    return _footprint(options, facts, _stored_layout(options, facts), facts.state.bytes_per_sequence)


def _rank_footprint(options: PlanOptions, facts: ModelFacts) -> Footprint:
    check_ranks(facts.num_heads, options.tensor_parallel)
    layout = layout_of_rank(_stored_layout(options, facts), options.tensor_parallel)
    return _footprint(options, facts, layout, -(-facts.state.bytes_per_sequence // options.tensor_parallel))


def _stored_layout(options: PlanOptions, facts: ModelFacts) -> KvLayout:
    engine = _engine(options, facts)
    return facts.layout if engine is None else engine.layout


def _engine(options: PlanOptions, facts: ModelFacts) -> EngineStorage | None:
    return facts.engine if options.storage == "engine" else None


def _footprint(options: PlanOptions, facts: ModelFacts, layout: KvLayout, state_bytes: int) -> Footprint:
    engine = _engine(options, facts)
    return Footprint(
        layer_groups(layout, options.kv_format),
        options.block_size,
        engine is None or engine.gives_back,
        state_bytes,
        num_tables=1 if engine is None else engine.num_tables,
        prefill_tokens=0 if engine is None else PREFILL_TOKENS,
    )


def _budget(options: PlanOptions, facts: ModelFacts) -> KvBudget | None:
    if options.memory_bytes is None:
        return None
    if facts.weights is None:
        raise refused(
            "num_parameters",
            None,
            "a number such as 70.6B, or weights_bytes, as this model does not tell its own"
            + (f": {facts.weights_refusal}" if facts.weights_refusal else ""),
        )
    return kv_budget(
        [GpuMemory(total, options.in_use_bytes) for total in options.memory_bytes],
        weights_bytes=-(-facts.weights.num_bytes // options.tensor_parallel),
        reserve_bytes=options.reserve_bytes,
        utilization=options.utilization,
    )


def _blocks(rank: Footprint, kv: int) -> tuple[int, int]:
    """The blocks of a pool of so many bytes, and the bytes of all but the null block."""
    if rank.block_bytes == 0:
        return 0, kv
    num_blocks = kv // rank.block_bytes
    if num_blocks < 2:
        raise refused(
            "block_size",
            rank.block_size,
            f"blocks of which two fit into the {show_bytes(kv)} left for the KV cache",
        )
    if _unit(rank) == 1:
        return num_blocks, kv - rank.block_bytes
    return num_blocks, (num_blocks - 1) * rank.block_bytes


def _unit(rank: Footprint) -> int:
    """All that is given is a multiple of a block, unless states are kept, or windows where blocks are of all layers."""
    windows = rank.windows_give_back and any(group.window for group in rank.groups)
    mixed = rank.state_bytes or (windows and not rank.prefill_tokens)
    return 1 if mixed else max(1, rank.block_bytes)


def _untouched(options: PlanOptions, rank: Footprint, num_blocks: int) -> int:
    return int(np.ceil(options.watermark * (num_blocks - 1))) * rank.block_bytes


def _requests(
    options: PlanOptions, rank: Footprint, pool: Pool, lengths: LengthDistribution | None, cap: int | None
) -> tuple[dict[str, int], Mix | None]:
    """The requests of one engine, by length, and of the mix."""
    prefix = options.shared_prefix
    shared = rank.shared_bytes(prefix)

    def fit(num_tokens: int) -> int:
        own = int(rank.own_bytes(np.array([num_tokens], np.int64), prefix)[0])
        prefill = rank.prefill_bytes(num_tokens)
        # Alone a request may use the watermark, but not the room that its own prompt needs.
        if own + prefill > pool.usable_bytes - shared:
            return 0
        return requests_that_fit(_less(pool, prefill), own, shared)

    found, mix = {}, None
    if lengths is not None:
        found = {name: fit(lengths.percentile(percent)) for name, percent in PERCENTILES.items()}
    if cap is not None:
        found["cap"] = fit(cap)
    if lengths is not None:
        mix = _mix(options, rank, pool, lengths, shared)
        if options.held is not None:
            held = options.held if cap is None else options.held.capped(cap)
            mix = min(mix, _mix(options, rank, pool, held, shared), key=lambda mix: mix.requests)
        found["mix"] = mix.requests
    return found, mix


def _mix(options: PlanOptions, rank: Footprint, pool: Pool, lengths: LengthDistribution, shared: int) -> Mix:
    own = rank.own_bytes(lengths.tokens, options.shared_prefix)
    pool = _less(pool, rank.prefill_bytes(int(lengths.tokens[-1])))
    return requests_of_mix(pool, own, lengths.counts, options.risk, shared)


def _less(pool: Pool, num_bytes: int) -> Pool:
    """A pool of which so much more stays free while others run: for the prompt that is being computed."""
    return replace(pool, untouched_bytes=pool.untouched_bytes + num_bytes)


def _check_size(rank: Footprint, most_tokens: int) -> None:
    if rank.bytes_per_token * most_tokens > LARGEST_REQUEST_BYTES:
        raise refused(
            "num_layers", len(rank.groups), "a model whose longest request takes less than 2**60 bytes"
        )
