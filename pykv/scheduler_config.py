"""What a scheduler is told once. Types are checked here, what the values mean by the core."""

from __future__ import annotations

import dataclasses
import numbers

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number, instance_of, refuse

__all__ = ["OPTION_RANGES", "SchedulerConfig"]

OPTION_RANGES = {option: (low, high) for option, low, high in _core.option_ranges()}
"""What the core says that an option which is a whole number may be, whatever the others are."""

_OPTIONAL = ("max_chunk_tokens", "max_queued_tokens", "max_pinned_blocks_per_tenant")
_NAMES = ("preemption", "admission", "queue_order", "eviction")
_SWITCHES = ("preempt_lower_ranks", "enable_prefix_caching", "report_other_scopes")
_REALS = ("watermark", "tenant_cache_share")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a scheduler is told once.

    Attributes:
        num_blocks: blocks of the pool, the null block 0 included, at least 2, and enough for one sequence of 2 tokens.
        num_host_blocks: blocks of the host's pool for preempted sequences, its null block 0 included; 0: none.
        preemption: "recompute"; "swap": copied to the host where there is room, with `num_host_blocks` of 2 or more;
            "auto": what costs less (`set_costs`).
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
            its prompt also gets up to half of `max_num_batched_tokens` before their decodes and prompts.
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
        for option, (low, high) in OPTION_RANGES.items():
            value = getattr(self, option)
            if value is not None or option not in _OPTIONAL:
                object.__setattr__(self, option, as_integer(option, value, low, high, ConfigError))
        object.__setattr__(self, "groups", _as_windows(self.groups))
        for option in _NAMES:
            instance_of(option, getattr(self, option), str, ConfigError)
        for option in _SWITCHES:
            as_boolean(option, getattr(self, option), ConfigError)
        for option in _REALS:
            as_number(option, getattr(self, option), ConfigError)
        _core.check_options(self)

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence can ever have: the least of `max_model_len` and what the pool can hold."""
        return _core.max_seq_len(self)

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block tables."""
        return -(-self.max_seq_len // self.block_size)


def _as_windows(groups: object) -> tuple[int | None, ...]:
    """Returns layer groups, with integers of Python."""
    if not isinstance(groups, tuple) or not all(window is None or _is_count(window) for window in groups):
        refuse("groups", groups, "a tuple of windows of at least 1 token and None", ConfigError)
    return tuple(None if window is None else int(window) for window in groups)


def _is_count(value: object) -> bool:
    """Whether the core can take a value as a number of tokens."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**64
