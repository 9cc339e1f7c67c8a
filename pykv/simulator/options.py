"""The options of a replay: named and checked before anything runs. What would be ignored is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number_in, one_of, optional, refuse, shown
from pykv.kv_format import BF16, KvFormat, kv_format_of
from pykv.near_names import near_or_all
from pykv.planner.sizes import read_bytes
from pykv.simulator.cost import CostModel
from pykv.simulator.policy import POLICIES, PRODUCTION_POLICIES, EvictionPolicy
from pykv.simulator.pool_size import blocks_in
from pykv.simulator.served_model import served_model
from pykv.simulator.step_cost import StepCost, read_cost

__all__ = ["ALLOCATORS", "MAX_BLOCKS", "SCHEDULER_OPTIONS", "ReplayOptions", "read_replay_options"]

ALLOCATORS = ("paged", "contiguous", "contiguous-exact")
MAX_BLOCKS = 2**26
"""A block takes some 70 bytes while it is replayed: more would take a machine down."""

SCHEDULER_OPTIONS = (
    "admission",
    "max_chunk_tokens",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_passes",
    "num_host_blocks",
    "preemption",
    "queue_order",
    "watermark",
)
PIECE_OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""What an allocator that keeps each request in one piece looks at."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What one replay is asked for. None stands for the default.

    Attributes:
        num_blocks: blocks that can hold tokens (a scheduler's null block comes on top); or a text such as "10%": that
            share of the trace's different blocks.
        serial: one request at a time, as a cache alone sees it; else virtual time.
        policy: who makes room, "lru" by default: a name of `POLICIES`, or an object with a method `rank`. In virtual
            time one of `PRODUCTION_POLICIES`, which are the scheduler's own.
        retention: what the scheduler is told of sessions, in virtual time: "none", the default; "session_end": exactly
            when one is over; "next_turn": that, and when each next turn comes; "session_idle": a guess, that one is
            over after eight of its mean gaps; "ttl:SECONDS": the same time to live for all.
        block_size: tokens a block, the trace's or 16 by default. It must divide the trace's, if that has one.
        kv_memory_bytes: the pool's size, in the place of `num_blocks`: bytes, or a text such as "20GiB".
        kv_bytes_per_token: in 16 bit, of heads of 128 elements; with `kv_memory_bytes`, where no model is named.
        kv_dtype: what `kv_dtype` of an engine may name, "bf16" by default: of the pool's bytes, scales counted, and of
            what a roofline's step reads.
        model: what is served, as `pykv plan` names it, where `cost` does not: how many bytes a block takes, which
            layers give back what left their window, and what a roofline's step computes and reads.
        allocator: "paged", the default; "contiguous": one piece of `max_model_len` for each request;
            "contiguous-exact": one piece as long as prompt and output turn out.
        cost: of a step: a model, or a text for `CostModel.parse`; `DEFAULT_COST` by default.
        speed: how many times as fast requests come as the trace says, 1 by default.
        concurrency: so many requests are always there, whatever the trace says about times.
        knows_outputs: whether the scheduler is told each output's length beforehand.
        scheduler: options of `pykv.SchedulerConfig` but sizes, by name; `max_model_len` is what the longest request
            needs by default.
    """

    num_blocks: int | str | None = None
    serial: bool = False
    policy: str | EvictionPolicy = "lru"
    retention: str | None = None
    block_size: int | None = None
    kv_memory_bytes: int | str | None = None
    kv_bytes_per_token: float | None = None
    kv_dtype: str | KvFormat | None = None
    model: str | os.PathLike[str] | None = None
    allocator: str = "paged"
    cost: str | CostModel | None = None
    speed: float | None = None
    concurrency: int | None = None
    knows_outputs: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy_name(self) -> str:
        """A policy in Python has its class's name."""
        return self.policy if isinstance(self.policy, str) else type(self.policy).__name__

    @property
    def kv_format(self) -> KvFormat:
        """How the cache is stored."""
        return BF16 if self.kv_dtype is None else kv_format_of(self.kv_dtype)

    def step_cost(self, block_size: int) -> StepCost:
        """What a step costs, and the model that it is a step of.

        Raises:
            ConfigError, ModelError: see `read_cost`.
        """
        if self.serial:  # of such a replay only the model counts, whose tokens are stored
            return StepCost(CostModel(), None if self.model is None else served_model(self.model))
        found = read_cost(self.cost, model=self.model, kv_format=self.kv_format, block_size=block_size)
        if self.kv_dtype is not None and not found.is_roofline:
            raise ConfigError(
                f"kv_dtype is {shown(self.kv_dtype)}: not allowed with cost {shown(self.cost)}, as what its steps read "
                "would not follow: allowed with a roofline"
            )
        return found

    def pool_blocks(self, block_size: int, step: StepCost) -> int | str | None:
        """The blocks that were asked for, or that fit the bytes that were.

        Raises:
            ConfigError: see `blocks_in`; or the bytes of a token are said twice.
        """
        if self.kv_memory_bytes is None:
            return self.num_blocks
        given = self.kv_bytes_per_token
        said = step.served or step.kv_bytes
        if given is not None and said is not None:
            by = step.served.name if step.served else "kv_bytes of cost"
            raise ConfigError(f"kv_bytes_per_token is {shown(given)}: not allowed where {by} says it")
        stored = said if given is None else given
        return blocks_in(
            read_bytes("kv_memory_bytes", self.kv_memory_bytes),
            block_size,
            stored=stored,
            kv_format=self.kv_format,
        )


def read_replay_options(given: Mapping[str, Any]) -> ReplayOptions:
    """Checks options that were given by name.

    Raises:
        ConfigError: an option is unknown, its value is not allowed, it contradicts another, or it would be ignored.
    """
    own = {field.name for field in fields(ReplayOptions)} - {"scheduler"}
    if unknown := sorted(set(given) - own - set(SCHEDULER_OPTIONS)):
        hint = near_or_all(unknown[0], [*own, *SCHEDULER_OPTIONS])
        raise ConfigError(f"{unknown[0]} is no option of a replay; {hint}")
    defaults = ("serial", "policy", "allocator", "knows_outputs")
    values = {name: value for name, value in given.items() if name in own}
    values = {name: value for name, value in values.items() if value is not None or name not in defaults}
    scheduler = {name: given[name] for name in given if name in SCHEDULER_OPTIONS and given[name] is not None}
    options = ReplayOptions(**values, scheduler=scheduler)
    _check_values(options)
    if options.serial:
        _check_serial(options)
    else:
        _check_timed(options)
    if options.allocator != "paged":
        _check_pieces(options, given)
    return options


def _check_values(options: ReplayOptions) -> None:
    for name in ("serial", "knows_outputs"):
        as_boolean(name, getattr(options, name), ConfigError)
    one_of("allocator", options.allocator, ALLOCATORS)
    if isinstance(options.policy, str):
        one_of("policy", options.policy, tuple(POLICIES))
    elif isinstance(options.policy, type) or not callable(getattr(options.policy, "rank", None)):
        allowed = f"one of {', '.join(POLICIES)}, or an object with a method rank"
        refuse("policy", options.policy, allowed, ConfigError)
    if options.cost is not None and not isinstance(options.cost, str | CostModel):
        refuse("cost", options.cost, "a CostModel, or a text that names one", ConfigError)
    if options.model is not None and not isinstance(options.model, str | os.PathLike):
        refuse("model", options.model, "a folder, a config.json, or a known name", ConfigError)
    if options.retention is not None and not isinstance(options.retention, str):
        refuse("retention", options.retention, "the name of a rule", ConfigError)
    if (options.num_blocks is None) == (options.kv_memory_bytes is None):
        given = "neither" if options.num_blocks is None else "both"
        raise ConfigError(f"{given} of num_blocks and kv_memory_bytes is given: allowed is one of them")
    if options.kv_memory_bytes is None:
        _refuse(options, ["kv_bytes_per_token"], "without kv_memory_bytes")
    else:
        read_bytes("kv_memory_bytes", options.kv_memory_bytes)
    _ = options.kv_format


def _check_serial(options: ReplayOptions) -> None:
    names = ["cost", "speed", "concurrency", "knows_outputs", "retention", "allocator", *options.scheduler]
    _refuse(options, names, "with serial, which knows no time and no scheduler")
    if options.kv_memory_bytes is None:
        _refuse(options, ["model", "kv_dtype"], "with serial and without kv_memory_bytes")


def _check_timed(options: ReplayOptions) -> None:
    if options.policy not in PRODUCTION_POLICIES:
        allowed = " and ".join(map(repr, PRODUCTION_POLICIES))
        raise ConfigError(
            f"policy is {shown(options.policy_name)}: in virtual time allowed are {allowed}; others need serial"
        )
    if options.concurrency is not None:
        _refuse(options, ["speed"], "with concurrency, which does not look at the trace's times")
    optional(as_number_in, "speed", options.speed, 1e-6, 1e6, ConfigError)
    optional(as_integer, "concurrency", options.concurrency, 1, MAX_BLOCKS, ConfigError)


def _check_pieces(options: ReplayOptions, given: Mapping[str, Any]) -> None:
    names = ["retention", "knows_outputs"]
    names += [name for name in options.scheduler if name not in PIECE_OPTIONS]
    why = f"with allocator {shown(options.allocator)}, which keeps no blocks: it comes first, it is served first"
    if given.get("policy") is not None:  # its default too: there is nothing to evict
        raise ConfigError(f"policy: not allowed {why}")
    _refuse(options, names, why)


def _refuse(options: ReplayOptions, names: Iterable[str], why: str) -> None:
    """Refuses options that were given: of which the value is not the default."""
    default = ReplayOptions()
    given = [
        name
        for name in names
        if name in options.scheduler or getattr(options, name) != getattr(default, name)
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: not allowed {why}")
