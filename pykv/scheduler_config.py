"""What a scheduler is told once, and what of it is refused."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from typing import Any

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number, one_of, refuse, shown

__all__ = ["SchedulerConfig", "core_options"]

_OPTIONAL = ("max_chunk_tokens", "max_queued_tokens", "max_pinned_blocks_per_tenant")
_CHOICES: dict[str, tuple[str, ...]] = {
    "preemption": ("auto", "recompute", "swap"),
    "admission": ("forecast", "watermark"),
    "queue_order": ("fcfs", "priority", "longest_prefix", "fair_share"),
    "eviction": ("lru", "segmented_lru"),
}
_SWITCHES = ("preempt_lower_ranks", "enable_prefix_caching", "report_other_scopes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a scheduler is told once.

    Attributes:
        num_blocks: blocks of the pool, the null block 0 included, at least 2, and enough for one sequence of 2 tokens.
        num_host_blocks: blocks of the host's pool for preempted sequences, its null block 0 included; 0: none.
        preemption: "recompute"; "swap": copied to the host where there is room; "auto": what costs less (`set_costs`).
        block_size: tokens a block, 1 to 65,536.
        groups: the model's layer groups, one to 64 of them: None for layers that keep every position, else the sliding
            window in tokens (a query at q reads the keys with q - k < window). Each group has a block table of its own
            and all take their blocks from one pool, so all have equally many layers. Blocks that left a window are
            given back.
        max_num_seqs: sequences that run at once: rows of the block tables.
        max_num_batched_tokens: tokens that one step computes.
        max_chunk_tokens: tokens of one sequence that one step computes; None: no cap but the step's.
        num_lookahead_tokens: drafts that one sequence may have checked in a step (`propose`); 0: no speculation.
        max_model_len: tokens of one sequence, prompt and output together.
        max_steps_in_flight: steps that may be planned and not applied yet: 1, or 2 to plan a step while the one before
            it runs (docs/embedding.md); drafts are refused then.
        watermark: share of the blocks, from 0 to below 1, that an admission leaves untouched while others run.
        admission: "forecast": a sequence starts when the worst moment to come fits the pool too, if outputs turn out as
            long as they are expected to; "watermark": when its blocks can be given now.
        enable_prefix_caching: whether full blocks are found again by prompts that begin with the same tokens.
        eviction: which cached blocks make room first, among those that sessions, shares and priorities leave equal:
            "lru": those used least recently; "segmented_lru": before them, those that no hit has found yet.
        tenant_cache_share: share of the blocks, from 0 to 1, that a tenant's own cached ones may fill before they make
            room first (`set_cache_share` for one tenant); 1: any.
        max_pinned_blocks: blocks that may be pinned (`pin`). A sequence must fit beside them: `max_seq_len` is less by
            as much.
        max_pinned_blocks_per_tenant: blocks that one tenant may pin; None: all of them.
        max_kv_events: events about cached blocks that wait to be taken (`take_events`); 0: none are kept.
        report_other_scopes: whether `missed_other_scope` tells that a block is cached in another scope. Whoever sees it
            learns what others have sent: for an operator's own eyes.
        num_state_slots: slots for the states of fixed size that the model's linear attention, SSM or short convolutions
            keep of each sequence, slot 0 (the initial state) included; 0: it has none. A running sequence works in one,
            the others hold checkpoints for prefix hits. At least 3, and 2 more than a request has samples: one is
            needed to start again from when a step fails. States are not swapped, rolled back or pinned:
            `num_host_blocks`, `num_lookahead_tokens` and `max_pinned_blocks` must be 0 with them, and
            `max_steps_in_flight` 1.
        checkpoint_every: blocks from one place for a checkpoint of the states to the next; chunks of prompts end there.
        queue_order: "fcfs"; "priority"; "longest_prefix": who finds most of its prompt in the cache; "fair_share":
            equal shares of tokens for all tenants (virtual token counters; Sheng et al., OSDI 2024).
        max_passes: how often a waiting sequence may be passed by later ones before all others wait for it.
        preempt_lower_ranks: whether a waiting request may push out running ones of a later priority; under "priority",
            its prompt also gets up to half of `max_num_batched_tokens` before their decodes.
        partial_block_reuse: where a prompt's hit ends inside a cached block, the fewest tokens of that block that are
            reused by copying it (`copy_pairs`), up to `block_size - 1`; 0: none are, a hit is whole blocks.
        max_queued_requests: sequences that may wait; a request counts each of its samples.
        max_queued_tokens: tokens of prompts that may wait; None: no limit.

    Raises:
        ConfigError: an option is not of its type or out of its range.
    """

    num_blocks: int
    num_host_blocks: int = 0
    preemption: str = "auto"
    block_size: int = 16
    groups: tuple[int | None, ...] = (None,)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    num_lookahead_tokens: int = 0
    max_model_len: int = 8192
    max_steps_in_flight: int = 1
    watermark: float = 0.01
    admission: str = "forecast"
    queue_order: str = "fcfs"
    max_passes: int = 16
    preempt_lower_ranks: bool = False
    enable_prefix_caching: bool = True
    eviction: str = "lru"
    tenant_cache_share: float = 1.0
    max_pinned_blocks: int = 0
    max_pinned_blocks_per_tenant: int | None = None
    max_kv_events: int = 0
    report_other_scopes: bool = False
    num_state_slots: int = 0
    checkpoint_every: int = 16
    partial_block_reuse: int = 0
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        num_blocks, block_size = _integer(self.num_blocks), _integer(self.block_size)
        limits = {
            "num_blocks": (2, 2**30),
            "num_host_blocks": (0, 2**30),
            "block_size": (1, 65_536),
            "max_num_seqs": (1, 2**20),
            "max_num_batched_tokens": (1, 2**30),
            "max_chunk_tokens": (1, 2**30),
            "num_lookahead_tokens": (0, 1024),
            "max_model_len": (2, 2**30),
            "max_steps_in_flight": (1, 2),
            "max_passes": (0, 2**30),
            "max_pinned_blocks": (0, max(0, num_blocks - 2)),
            "max_pinned_blocks_per_tenant": (0, 2**30),
            "max_kv_events": (0, 2**24),
            "num_state_slots": (0, 2**24),
            "checkpoint_every": (1, 2**24),
            "partial_block_reuse": (0, max(0, block_size - 1)),
            "max_queued_requests": (1, 2**30),
            "max_queued_tokens": (1, 2**40),
        }
        for field, (low, high) in limits.items():
            value = getattr(self, field)
            if value is None and field in _OPTIONAL:
                continue
            object.__setattr__(self, field, as_integer(field, value, low, high, ConfigError))
        if self.max_steps_in_flight > 1 and self.num_lookahead_tokens > 0:
            allowed = "0 where max_steps_in_flight is 2"
            refuse("num_lookahead_tokens", self.num_lookahead_tokens, allowed, ConfigError)
        object.__setattr__(self, "groups", _checked_groups(self.groups))
        for field, choices in _CHOICES.items():
            one_of(field, getattr(self, field), choices)
        for field in _SWITCHES:
            as_boolean(field, getattr(self, field), ConfigError)
        if not 0.0 <= as_number("watermark", self.watermark, ConfigError) < 1.0:
            refuse("watermark", self.watermark, "at least 0 and below 1", ConfigError)
        if not 0.0 <= as_number("tenant_cache_share", self.tenant_cache_share, ConfigError) <= 1.0:
            refuse("tenant_cache_share", self.tenant_cache_share, "0 to 1", ConfigError)
        _check_states(self)
        _check_room(self)

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can ever have: the least of `max_model_len` and what the pool can hold."""
        return self._longest(self.num_blocks)

    def _longest(self, num_blocks: int) -> int:
        """`max_seq_len` with so many blocks."""
        return _core.max_seq_len(
            num_blocks=num_blocks - self.max_pinned_blocks,
            block_size=self.block_size,
            windows=_windows(self),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_chunk_tokens=_max_chunk_tokens(self),
            max_model_len=self.max_model_len,
        )

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block tables."""
        return -(-self.max_seq_len // self.block_size)


def core_options(config: SchedulerConfig) -> dict[str, Any]:
    """The options as the core takes them: a number where None stands for no limit."""
    options = dataclasses.asdict(config)
    del options["groups"]
    options |= {"windows": _windows(config), "max_chunk_tokens": _max_chunk_tokens(config)}
    if options["max_queued_tokens"] is None:
        options["max_queued_tokens"] = 2**62
    if options["max_pinned_blocks_per_tenant"] is None:
        options["max_pinned_blocks_per_tenant"] = config.max_pinned_blocks
    return options


def _windows(config: SchedulerConfig) -> list[int]:
    return [window or 0 for window in config.groups]


def _max_chunk_tokens(config: SchedulerConfig) -> int:
    return config.max_num_batched_tokens if config.max_chunk_tokens is None else config.max_chunk_tokens


def _integer(value: object) -> int:
    """A number that others are compared with; what is none is refused by itself."""
    return int(value) if isinstance(value, numbers.Integral) else 0


def _checked_groups(groups: tuple[int | None, ...]) -> tuple[int | None, ...]:
    if not isinstance(groups, tuple) or not 1 <= len(groups) <= 64:
        refuse("groups", groups, "a tuple of 1 to 64 windows", ConfigError)
    for window in groups:
        is_window = isinstance(window, numbers.Integral) and not isinstance(window, bool)
        if window is not None and not (is_window and 1 <= window <= 2**30):
            raise ConfigError(
                f"groups is {shown(groups)}: allowed are None and windows of 1 to {2**30} tokens"
            )
    return tuple(None if window is None else int(window) for window in groups)


def _check_room(config: SchedulerConfig) -> None:
    """Refuses a pool in which the smallest request, a token of prompt and one of output, does not fit."""
    if config.max_seq_len >= 2:
        return
    # Each group needs a few blocks at the most, so the search is short.
    needed = next(count for count in itertools.count(config.num_blocks) if config._longest(count) >= 2)
    why = f"one sequence of 2 tokens in {len(config.groups)} layer groups"
    if config.max_pinned_blocks:
        why += f" beside max_pinned_blocks {config.max_pinned_blocks}"
    refuse("num_blocks", config.num_blocks, f"at least {needed}, for block 0 and {why}", ConfigError)


def _check_states(config: SchedulerConfig) -> None:
    if config.num_state_slots == 0:
        return
    if config.num_state_slots < 3:
        allowed = "0, or at least 3: the initial state, a slot to work in and one to start again from"
        raise ConfigError(f"num_state_slots is {config.num_state_slots}: allowed is {allowed}")
    for field, why in (
        ("num_host_blocks", "states are not swapped, they are computed again"),
        ("num_lookahead_tokens", "a state cannot be cut back to before a draft"),
        ("max_pinned_blocks", "checkpoints are not pinned"),
        ("partial_block_reuse", "there is no state inside a block"),
    ):
        if value := getattr(config, field):
            raise ConfigError(f"{field} is {value}: allowed is 0 with num_state_slots: {why}")
    if config.max_steps_in_flight > 1:
        allowed = "1 with num_state_slots: a step overwrites the states that the one before it gave"
        raise ConfigError(f"max_steps_in_flight is {config.max_steps_in_flight}: allowed is {allowed}")
