"""The scheduler: which tokens of which sequence a step computes, and where their K and V lie.

A step is `plan`, the model, `apply`:

    >>> import numpy as np
    >>> from pykv.scheduler import Scheduler, SchedulerConfig, StepBuffers
    >>> scheduler = Scheduler(SchedulerConfig(num_blocks=64))
    >>> buffers = StepBuffers(scheduler.config)
    >>> request = scheduler.submit([7, 8, 9], max_tokens=2)
    >>> plan = scheduler.plan(buffers)
    >>> buffers.token_ids[: plan.num_tokens].tolist()
    [7, 8, 9]
    >>> ended = scheduler.apply(plan, np.array([10]), np.array([OUTCOME_OK], np.uint8))
    >>> plan = scheduler.plan(buffers)
    >>> buffers.token_ids[: plan.num_tokens].tolist(), buffers.positions[: plan.num_tokens].tolist()
    ([10], [3])

The module needs numpy only. Block tables as in Kwon et al., SOSP 2023, section 4.1; continuous batching as in
Yu et al., OSDI 2022, section 4.
"""

from __future__ import annotations

import enum
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykv import _core
from pykv._core import Plan, RequestSummary, SchedulerStats
from pykv.errors import ConfigError, InvalidRequestError
from pykv.events import KvEvents, events_of
from pykv.field_checks import (
    as_boolean,
    as_bytes,
    as_integer,
    as_number,
    instance_of,
)
from pykv.recording import Recording
from pykv.retention import Pin, checked_media, session_bytes
from pykv.scheduler_config import SchedulerConfig
from pykv.step_buffers import StepBuffers
from pykv.token_array import as_token_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "OUTCOME_FAILED",
    "OUTCOME_OK",
    "OUTCOME_STOP",
    "FinishReason",
    "Pin",
    "Plan",
    "RequestSummary",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "StepBuffers",
]

OUTCOME_OK = 0
"""The sampled token counts and its sequence goes on."""
OUTCOME_STOP = 1
"""The sampled token counts and is the last of its sequence."""
OUTCOME_FAILED = 2
"""The sample is no token: its sequence ends with an error."""


class FinishReason(enum.IntEnum):
    """What became of a sample, as `StepBuffers.finish_reasons` says it after `Scheduler.apply`."""

    NONE = 0
    """The token counts and the sequence goes on."""
    STOP = 1
    """The token counts and is the last: the caller said so."""
    LENGTH = 2
    """The token counts and is the last: `max_tokens` or the context cap is reached."""
    ABORT = 3
    """The request was aborted; the token does not count."""
    ERROR = 4
    """The sample or its batch row failed; the token does not count."""
    VOID = 5
    """The token does not count and will be sampled again: a failed row should have computed what it was drawn from."""
    REJECTED = 6
    """The token does not count: it follows a draft that was not accepted, or the end of its sequence."""


class Scheduler:
    """A continuous-batching scheduler over a paged pool with a prefix cache.

    It never calls out, holds no clock, and gives the same decisions for the same calls. Its methods may be called from
    any thread; one lock is held for the microseconds that a call takes.

    Raises:
        ConfigError: `config` is none.
        MemoryError: the system does not give what the blocks' books need.
        PoisonedError: from any method, after an invariant broke or the core panicked.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = instance_of("config", config, SchedulerConfig, ConfigError)
        self._native = _core.Scheduler(config, hash_seed=secrets.randbits(64))
        self._recording: Recording | None = None

    def submit(
        self,
        prompt: NDArray[np.int32] | Sequence[int],
        *,
        max_tokens: int | None = None,
        num_samples: int = 1,
        scope: bytes = b"",
        reuse_cached: bool = True,
        tenant: bytes = b"",
        priority: int = 0,
        deadline: float | None = None,
        session: bytes | str | None = None,
        ttl: float | None = None,
        next_turn: float | None = None,
        retention_priority: int = 0,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> int:
        """Queues a request; nothing of the pool is taken yet.

        Args:
            prompt: token ids, at least one: an int32 buffer of one dimension, or integers.
            max_tokens: the most tokens that each sample may get; None: up to the context cap.
            num_samples: sequences that continue the prompt; they share its blocks.
            scope: what may share: requests hit cached blocks of the same scope only.
            reuse_cached: False computes the whole prompt, for who wants the logits of each of its tokens.
            tenant: who pays for it, under "fair_share", and whose the blocks are that only its requests have used: they
                count against its share of the cache (`set_cache_share`). Sessions and quotas of pins are per tenant.
            priority: under "priority", the lowest number comes first.
            deadline: the time, in seconds on the clock of `plan`, after which the request ends if it waits still, or if
                nothing of it was computed because the steps that it started with were discarded.
            session: the session that it belongs to, among its tenant's; text is the same as its UTF-8 bytes. What only
                ended sessions have used makes room first (`end_session`).
            ttl: seconds on the clock of `plan`, from the end of the session's last request, after which it counts as
                ended; without a session, for the blocks of this request alone. Where `plan` is given no time it never
                passes.
            next_turn: seconds, counted alike, within which the session's next request is expected: its blocks are kept
                over all others until then, for good where `plan` is given no time; then they stand by their last use.
            retention_priority: -2 to 2; blocks of a higher one are kept longer, among those that sessions do not tell
                apart.
            media: (offset, hash) by rising offset: the token with which a medium begins, and 1 to 64 bytes that no
                other medium has. Blocks from there on match only the same medium at the same offset.

        Returns:
            The request's number, never used again.

        Raises:
            InvalidRequestError: a field's value is not allowed.
            CapacityError: prompt and one output token pass the context cap or the pool.
            QueueFullError: `max_queued_requests` sequences or `max_queued_tokens` tokens would be passed.
        """
        return self._native.submit(
            as_token_array(prompt, "prompt"),
            max_tokens=None if max_tokens is None else as_integer("max_tokens", max_tokens, 1, 2**63 - 1),
            num_samples=as_integer("num_samples", num_samples, 1, 2**31 - 1),
            scope=as_bytes("scope", scope),
            reuse_cached=as_boolean("reuse_cached", reuse_cached),
            tenant=as_bytes("tenant", tenant),
            priority=as_integer("priority", priority, -(2**31), 2**31 - 1),
            deadline=None if deadline is None else as_number("deadline", deadline),
            session=None if session is None else session_bytes(session),
            ttl=None if ttl is None else as_number("ttl", ttl),
            next_turn=None if next_turn is None else as_number("next_turn", next_turn),
            retention_priority=as_integer("retention_priority", retention_priority, -2, 2),
            media=checked_media(media),
        )

    def cached_tokens(self, tokens: NDArray[np.int32] | Sequence[int], *, scope: bytes = b"") -> int:
        """Returns how many of the first tokens are cached in a scope. Changes nothing.

        Raises:
            InvalidRequestError: `tokens` are no token ids, or `scope` is not bytes.
        """
        return self._native.cached_tokens(as_token_array(tokens, "tokens"), as_bytes("scope", scope))

    def num_cached_tokens(self, request: int) -> int | None:
        """Returns how many tokens of its prompt a live request found cached, as its summary will say.

        0 before its first step was applied; None where no live request has this number.

        Raises:
            InvalidRequestError: it is no request's number.
        """
        return self._native.num_cached_tokens(as_integer("request", request, 0, 2**64 - 1))

    def take_events(self) -> KvEvents:
        """Takes the events about cached blocks since the last call, oldest first; at most `max_kv_events` wait."""
        return events_of(self._native.take_events(), self.config.block_size)

    def snapshot_events(self) -> KvEvents:
        """Returns all cached blocks as if each had just been stored, parents first, in time that grows with them.

        For a listener that has missed events, or starts late. Events with numbers from `sequence` on come after it.
        """
        return events_of(self._native.snapshot_events(), self.config.block_size)

    def end_session(self, session: bytes | str, *, tenant: bytes = b"") -> bool:
        """Says that a session has no further turn: cached blocks that only ended sessions have used make room first.

        A request of the session that comes all the same makes it live again.

        Returns:
            Whether the session was known and live.

        Raises:
            InvalidRequestError: an argument is not of its type.
        """
        return self._native.end_session(session_bytes(session), as_bytes("tenant", tenant))

    def pin(
        self, tokens: NDArray[np.int32] | Sequence[int], *, scope: bytes = b"", tenant: bytes = b""
    ) -> Pin | None:
        """Keeps the cached blocks that `tokens` begin with, until `unpin` or `reset_prefix_cache`.

        Blocks of a step in flight are not cached yet. A block counts once for each pin that holds it.

        Returns:
            The pin, and how many of the first tokens it holds; None if nothing of them is cached.

        Raises:
            PinQuotaError: `max_pinned_blocks` or `max_pinned_blocks_per_tenant` would be passed; nothing was pinned.
            InvalidRequestError: `tokens` are no token ids, or another argument is not of its type.
        """
        pinned = self._native.pin(
            as_token_array(tokens, "tokens"), as_bytes("scope", scope), as_bytes("tenant", tenant)
        )
        return None if pinned is None else Pin(*pinned)

    def unpin(self, pin: Pin) -> bool:
        """Gives a pin up. Returns whether it still was one.

        Raises:
            InvalidRequestError: it is no pin.
        """
        number = instance_of("pin", pin, Pin, InvalidRequestError).id
        return self._native.unpin(as_integer("pin.id", number, 0, 2**64 - 1))

    def set_cache_share(self, tenant: bytes, share: float) -> None:
        """Sets the share of the blocks, 0 to 1, that a tenant's own cached ones may fill before they make room first.

        A block that several tenants have used is nobody's own.

        Raises:
            InvalidRequestError: an argument is not of its type or out of its range.
        """
        self._native.set_cache_share(as_bytes("tenant", tenant), as_number("share", share))

    def abort(self, request: int) -> bool:
        """Ends a request: at once, or with the last step in flight that has a row for it. Returns whether it lived.

        Raises:
            InvalidRequestError: it is no request's number.
        """
        return self._native.abort(as_integer("request", request, 0, 2**64 - 1))

    def pause(self, request: int) -> bool:
        """Keeps a request out of the plans to come until `resume`.

        Its blocks stay its own as long as nobody else needs them; it gives way before all that run. The time until it
        is resumed does not count as a stall. A request in a step in flight still gets that step's tokens.

        Returns:
            Whether it lives.

        Raises:
            InvalidRequestError: it is no request's number.
        """
        return self._native.pause(as_integer("request", request, 0, 2**64 - 1))

    def resume(self, request: int) -> bool:
        """Lets a paused request go on. Returns whether there was one.

        Raises:
            InvalidRequestError: it is no request's number.
        """
        return self._native.resume(as_integer("request", request, 0, 2**64 - 1))

    def plan(self, buffers: StepBuffers, now: float = 0.0) -> Plan | None:
        """Decides the next step and writes it into `buffers`.

        Args:
            buffers: made for this scheduler's configuration.
            now: the time in seconds, on a clock of the caller's: that of `deadline`, `ttl`, `next_turn` and
                `stalled_seconds`. It never goes back: an earlier time counts as the latest so far. Without it nothing
                ever expires. Where thousands of sessions' times pass at once, some are left to the next plans.

        Returns:
            How much of each array is filled; None if there is nothing to compute, or, with a step in flight, nothing
            that need not wait for it.

        Raises:
            StepError: `max_steps_in_flight` steps are in flight, or the buffers hold one of them or were made for
                another configuration; nothing was changed.
            InvalidRequestError: `now` is negative or no finite number; nothing was changed.
            ConfigError: the buffers have page lists, which could pass 2**31 entries; nothing was changed.
        """
        native = instance_of("buffers", buffers, StepBuffers)._native
        seconds = as_number("now", now)
        if self._recording is not None and not self._recording.closed:
            self._recording.write_pending()
        return self._native.plan(native, seconds)

    def propose(self, rows: NDArray[np.int32], starts: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        """Proposes what running sequences may go on with: the next plan computes it behind their last token.

        Each plan forgets what was proposed before it, used or not. A row whose sequence has ended, or that has more
        than one token to compute, is passed over. Drafts are cut where the step's budget, the free or idle blocks, or
        the sequence's limit end; they preempt nobody.

        In the plan, the `num_draft_rows` batch rows after the decodes have the last token and the drafts, with a sample
        for each: the first of row i is `np.searchsorted(buffers.sample_indices[: plan.num_samples],
        buffers.query_starts[i])`.

        Args:
            rows: int32 [n], rows of the block tables (as in `sample_rows`), each at most once.
            starts: int32 [n + 1]; rows[i] gets tokens[starts[i] : starts[i + 1]], at most `num_lookahead_tokens`.
            tokens: int64, token ids.

        Raises:
            StepError: a step is in flight, or an array does not fit; nothing was changed.
        """
        self._native.propose(rows, starts, tokens)

    def apply(
        self,
        plan: Plan,
        sampled: NDArray[np.int64],
        outcomes: NDArray[np.uint8],
        failed_rows: NDArray[np.int32] | None = None,
        accepted: NDArray[np.int32] | None = None,
    ) -> list[RequestSummary]:
        """Takes in what a step gave: appends tokens, ends what is done, makes full blocks findable.

        `finish_reasons` of the plan's buffers then says what became of each sample (`FinishReason`).

        Args:
            plan: the step in flight, or the older of two.
            sampled: int64 [num_samples], a token for each sample.
            outcomes: uint8 [num_samples], `OUTCOME_OK`, `OUTCOME_STOP` or `OUTCOME_FAILED`.
            failed_rows: int32, batch rows that failed as a whole, with or without a sample.
            accepted: int32 [num_batch_rows], how many of each row's drafts are accepted; the samples that check those
                must be the drafts themselves. The sample after them counts too, no later one. None: as many as agree.

        Returns:
            The requests that have ended since the last call; their blocks were given back.

        Raises:
            StepError: the plan is not in flight, or not the oldest that is, or an array does not fit it; nothing was
                changed.
        """
        return self._native.apply(instance_of("plan", plan, Plan), sampled, outcomes, failed_rows, accepted)

    def discard(self, plan: Plan) -> None:
        """Takes a step back that failed as a whole: nothing of it was computed.

        A step that was planned after it is discarded first. A state that the step has touched cannot be brought back:
        with `num_state_slots`, the step's sequences start again from their last checkpoint; the first that runs does so
        once at the most, and then goes on where it stood.

        Raises:
            StepError: the plan is not in flight.
        """
        self._native.discard(instance_of("plan", plan, Plan))

    def set_costs(self, *, seconds_per_token: float, seconds_per_block: float) -> None:
        """Tells what was measured: preemption "auto" chooses by it.

        Args:
            seconds_per_token: to compute one token of a prompt.
            seconds_per_block: to copy one block to the host, or from it.

        Raises:
            ConfigError: one of them is no finite number of at least 0; nothing was changed.
        """
        self._native.set_costs(
            seconds_per_token=as_number("seconds_per_token", seconds_per_token, ConfigError),
            seconds_per_block=as_number("seconds_per_block", seconds_per_block, ConfigError),
        )

    def take_ended(self) -> list[RequestSummary]:
        """The requests that ended since the last call of this or of `apply`, such as those aborted between steps."""
        return self._native.take_ended()

    def reset_prefix_cache(self) -> None:
        """Makes nothing of what was computed so far findable any more; what runs goes on and publishes nothing more.

        Takes time that grows with the cached blocks, about 0.1 s for a million; other calls wait for it.
        """
        self._native.reset_prefix_cache()

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Records every call from here on into a file that `pykv.recording.replay_recording` takes.

        The file holds the prompts' and outputs' token ids.

        Raises:
            RecordingError: the scheduler was used already or is being recorded, or `path` is no path.
            OSError: the file cannot be written.
        """
        self._recording = Recording(self._native, path)
        return self._recording

    def stats(self) -> SchedulerStats:
        """Counts blocks, sequences and hits, in time that grows with the sequences that hold blocks only.

        Of the `peak_` counts, `peak_blocks_active` and `peak_num_running` are the most so far. The others belong to the
        moment of `peak_blocks_active`, so that they can be compared with each other; they can fall.
        """
        return self._native.stats()

    def check(self) -> None:
        """Compares pool, tree, tables and queues with each other, in time that grows with all of them.

        Raises:
            PoisonedError: an invariant of docs/invariants.md does not hold.
        """
        self._native.check()
