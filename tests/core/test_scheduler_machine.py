"""Random histories through the scheduler's Python face, against an exact toy model that reads through block tables.

The toy's "K and V" of a token mix it with its position, and its next token is a hash of all K and V that it sees: one
wrong, stale or foreign slot changes every token after it. With states, a running hash of all tokens counts too. Each
request's tokens are compared with what the toy gives without pages, neighbours, hits, chunks or preemption.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from pykv.errors import QueueFullError, StepError
from pykv.scheduler import (
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_STOP,
    FinishReason,
    Plan,
    RequestSummary,
    Scheduler,
    SchedulerConfig,
    StepBuffers,
)

Words = NDArray[np.uint64]

VOCABULARY = 40
MAX_MODEL_LEN = 48
COUNTED = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH)


def mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def kv(group: int, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Words:
    """What a layer group keeps of tokens at positions: never 0, which is what an empty slot holds."""
    place = np.uint64(group + 1) << np.uint64(56)
    return mix(place | tokens.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64))


def next_token(seen: list[Words], child: int) -> int:
    """The token that follows what each group has seen."""
    sums = [words.sum(dtype=np.uint64) for words in seen]
    state = mix(np.array([*sums, child], np.uint64)).sum(dtype=np.uint64)
    return int(mix(np.array([state]))[0] % np.uint64(VOCABULARY))


def visible(window: int | None, length: int) -> slice:
    """The positions that the last of `length` tokens sees."""
    return slice(0 if window is None else max(0, length - window), length)


INITIAL_STATE = 5


def state_after(state: int, tokens: Iterable[int]) -> int:
    """A running hash of all tokens: never 0, which is what an empty slot holds."""
    for token in tokens:
        state = (state * 6364136223846793005 + 2 * token + 1442695040888963407) % 2**64 | 1
    return state


def continuation(config: SchedulerConfig, tokens: tuple[int, ...], child: int, count: int) -> list[int]:
    """The `count` tokens that follow, with nothing paged."""
    known = list(tokens)
    for _ in range(count):
        all_tokens, positions = np.array(known), np.arange(len(known))
        seen = [
            kv(group, all_tokens, positions)[visible(window, len(known))]
            for group, window in enumerate(config.groups)
        ]
        if config.num_state_slots:
            seen.append(np.array([state_after(INITIAL_STATE, known)], np.uint64))
        known.append(next_token(seen, child))
    return known[len(tokens) :]


class PagedToy:
    """The toy model over paged memory: runs plans in the order in which they were made."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.slots = np.zeros((config.num_blocks, config.block_size), np.uint64)
        self.host_slots = np.zeros((config.num_host_blocks, config.block_size), np.uint64)
        self.sampled = np.zeros(0, np.int64)
        self.states = [INITIAL_STATE, *[0] * max(config.num_state_slots - 1, 0)]
        self.num_seen = [0] * len(self.states)

    def run(self, plan: Plan, buffers: StepBuffers, children: NDArray[np.int64]) -> NDArray[np.int64]:
        """Copies blocks, writes the step's slots, then draws its samples; `children[i]` draws sample i."""
        for source, target in buffers.swap_out_pairs[: plan.num_swap_outs]:
            self.host_slots[target] = self.slots[source]
        for source, target in buffers.swap_in_pairs[: plan.num_swap_ins]:
            self.slots[target] = self.host_slots[source]
        for source, target in buffers.copy_pairs[: plan.num_copies]:
            self.slots[target] = self.slots[source]
        tokens, positions = buffers.token_ids[: plan.num_tokens].copy(), buffers.positions[: plan.num_tokens]
        sources = buffers.token_sources[: plan.num_decodes]
        (unknown,) = np.nonzero(sources >= 0)
        tokens[unknown] = self.sampled[sources[unknown]]
        for group, slots in enumerate(np.atleast_2d(buffers.slot_mapping)):
            written = slots[: plan.num_tokens]
            assert (written >= self.config.block_size).all(), "the null block is never written"
            assert len(set(written.tolist())) == plan.num_tokens, "no slot is written twice in a step"
            self.slots.reshape(-1)[written] = kv(group, tokens, positions)
        if self.config.num_state_slots:
            self.run_states(plan, buffers)
        sampled = [
            self.sample(plan, buffers, sample, int(children[sample])) for sample in range(plan.num_samples)
        ]
        self.sampled = np.array(sampled, np.int64)
        return self.sampled

    def run_states(self, plan: Plan, buffers: StepBuffers) -> None:
        """Copies states, goes on with each batch row's, copies states."""
        self.copy_states(buffers.state_restore_pairs[: plan.num_state_restores])
        starts = buffers.query_starts[: plan.num_batch_rows + 1].tolist()
        for row, slot in enumerate(buffers.state_slots[: plan.num_batch_rows].tolist()):
            first, end = starts[row : row + 2]
            assert slot > 0, "the initial state is never written"
            assert self.states[slot] != 0, "a state that is read was written"
            assert self.num_seen[slot] == buffers.positions[first], "a state has seen what lies before it"
            self.states[slot] = state_after(self.states[slot], buffers.token_ids[first:end].tolist())
            self.num_seen[slot] += end - first
        self.copy_states(buffers.state_save_pairs[: plan.num_state_saves])

    def copy_states(self, pairs: NDArray[np.int64]) -> None:
        targets = pairs[:, 1].tolist()
        assert len({*targets, 0}) == len(targets) + 1, "no slot is written twice, the initial state never"
        assert not set(targets) & set(pairs[:, 0].tolist()), "no slot is read and written"
        for source, target in pairs.tolist():
            self.states[target], self.num_seen[target] = self.states[source], self.num_seen[source]

    def spoil_states(self, plan: Plan, buffers: StepBuffers, rows: Iterable[int]) -> None:
        """Does to the states of some batch rows what a step that failed may have done."""
        for slot in buffers.state_slots[list(rows)].tolist() if self.config.num_state_slots else ():
            pairs = buffers.state_save_pairs[: plan.num_state_saves]
            for spoilt in (slot, *pairs[pairs[:, 0] == slot, 1].tolist()):
                self.states[spoilt] = 0

    def spoil(self, buffers: StepBuffers, first: int, end: int) -> None:
        """Fills the slots of some of the step's tokens with anything, as what has failed may."""
        for slots in np.atleast_2d(buffers.slot_mapping):
            self.slots.reshape(-1)[slots[first:end]] = 1

    def sample(self, plan: Plan, buffers: StepBuffers, sample: int, child: int) -> int:
        starts = buffers.query_starts[: plan.num_batch_rows + 1]
        batch_row = int(np.searchsorted(starts, buffers.sample_indices[sample], side="right")) - 1
        length, row = int(buffers.sample_positions[sample]), buffers.table_rows[batch_row]
        tables = buffers.block_tables.reshape(len(self.config.groups), self.config.max_num_seqs, -1)
        seen = []
        for table, window in zip(tables, self.config.groups, strict=True):
            positions = np.arange(length)[visible(window, length)]
            read = self.slots[
                table[row][positions // self.config.block_size], positions % self.config.block_size
            ]
            assert read.all(), "a slot that is read was written"
            seen.append(read)
        if self.config.num_state_slots:
            seen.append(np.array([self.states[buffers.state_slots[batch_row]]], np.uint64))
        return next_token(seen, child)


@dataclass
class InFlight:
    """A step that the toy has run and that is not applied yet, and whose samples it has drawn."""

    plan: Plan
    buffers: StepBuffers
    owners: list[tuple[int, int]]
    sampled: NDArray[np.int64]


@dataclass
class Submitted:
    """A request as the test knows it."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int
    scope: bytes
    outputs: list[list[int]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in range(self.num_samples)]

    def known(self, child: int) -> tuple[int, ...]:
        return (*self.prompt, *self.outputs[child])


class SchedulerMachine(RuleBasedStateMachine):
    """Every public call in any order; all invariants are checked after each."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        groups=st.sampled_from([(None,), (None,), (9,), (None, 5), (4, None, 11)]),
        spare=st.integers(0, 6),
        budget=st.integers(6, 40),
        num_host_blocks=st.sampled_from([0, 6, 40]),
        num_lookahead_tokens=st.sampled_from([0, 3]),
        max_steps_in_flight=st.sampled_from([1, 2]),
        states=st.sampled_from([(0, 16), (5, 1), (6, 2), (12, 3)]),
        partial_block_reuse=st.integers(0, 3),
        options=st.fixed_dictionaries(
            {
                "queue_order": st.sampled_from(["fcfs", "priority", "longest_prefix", "fair_share"]),
                "preempt_lower_ranks": st.booleans(),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "preemption": st.sampled_from(["auto", "recompute", "swap"]),
                "admission": st.sampled_from(["forecast", "watermark"]),
                "max_chunk_tokens": st.sampled_from([None, 5]),
                "max_passes": st.integers(0, 2),
            }
        ),
    )
    def start(
        self,
        block_size: int,
        groups: tuple[int | None, ...],
        spare: int,
        budget: int,
        num_host_blocks: int,
        num_lookahead_tokens: int,
        max_steps_in_flight: int,
        states: tuple[int, int],
        partial_block_reuse: int,
        options: dict[str, object],
    ) -> None:
        num_state_slots, checkpoint_every = states
        if num_state_slots:
            num_host_blocks = num_lookahead_tokens = 0
            max_steps_in_flight = 1
        if not num_host_blocks and options["preemption"] == "swap":
            options = options | {"preemption": "recompute"}
        config = SchedulerConfig(
            num_blocks=len(groups) * (MAX_MODEL_LEN // block_size + 2 + spare),
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            groups=groups,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            num_lookahead_tokens=num_lookahead_tokens if max_steps_in_flight == 1 else 0,
            max_steps_in_flight=max_steps_in_flight,
            num_state_slots=num_state_slots,
            checkpoint_every=checkpoint_every,
            partial_block_reuse=0 if num_state_slots else min(partial_block_reuse, block_size - 1),
            max_model_len=MAX_MODEL_LEN,
            max_queued_requests=12,
            watermark=0.0,
            **options,  # type: ignore[arg-type]
        )
        self.config = config
        self.cap = config.max_seq_len
        self.scheduler = Scheduler(config)
        self.scheduler.set_costs(seconds_per_token=1e-4, seconds_per_block=1e-5)
        self.toy = PagedToy(config)
        self.buffers = [StepBuffers(config), StepBuffers(config)]
        self.in_flight: list[InFlight] = []
        self.now = 0.0
        self.submitted: dict[int, Submitted] = {}
        self.rows: dict[int, tuple[int, int]] = {}
        self.ended: dict[int, RequestSummary] = {}

    @rule(
        seed=st.integers(0, 2),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 24),
        num_samples=st.sampled_from([1, 1, 2, 3]),
        scope=st.sampled_from([b"", b"other"]),
        priority=st.integers(0, 2),
        patience=st.sampled_from([None, None, 0.0, 1.5]),
        reuse_cached=st.sampled_from([True, True, False]),
        copies=st.integers(1, 3),
    )
    def submit(
        self,
        seed: int,
        length: int,
        max_tokens: int,
        num_samples: int,
        scope: bytes,
        priority: int,
        patience: float | None,
        reuse_cached: bool,
        copies: int,
    ) -> None:
        prompt = tuple(
            (place * 7 + seed * place // 9) % VOCABULARY for place in range(min(length, self.cap - 1))
        )
        for _ in range(copies):
            before = self.counts()
            try:
                request = self.scheduler.submit(
                    prompt,
                    max_tokens=max_tokens,
                    num_samples=num_samples,
                    scope=scope,
                    tenant=scope,
                    priority=priority,
                    deadline=None if patience is None else self.now + patience,
                    reuse_cached=reuse_cached,
                )
            except QueueFullError:
                assert self.counts() == before, "a refused call changes nothing"
                return
            assert request not in self.submitted
            self.submitted[request] = Submitted(prompt, max_tokens, num_samples, scope)

    @rule(count=st.integers(1, 8), num_drafts=st.integers(0, 3), num_right=st.integers(0, 3))
    def steps(self, count: int, num_drafts: int, num_right: int) -> None:
        for _ in range(count):
            if self.config.num_lookahead_tokens > 0:
                self.propose(num_drafts, num_right)
            self.step(())

    @rule(
        troubles=st.lists(
            st.tuples(
                st.sampled_from(["stop", "failed sample", "failed row", "abort", "reset", "wrong order"]),
                st.integers(0, 30),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def step_with_trouble(self, troubles: list[tuple[str, int]]) -> None:
        self.step(tuple(troubles))

    @rule(newest=st.booleans())
    def discard(self, newest: bool) -> None:
        self.plan()
        if self.in_flight:
            first = len(self.in_flight) - 1 if newest else 0
            for step in self.in_flight[first:]:
                self.toy.spoil(step.buffers, 0, step.plan.num_tokens)
                self.toy.spoil_states(step.plan, step.buffers, range(step.plan.num_batch_rows))
            self.scheduler.discard(self.in_flight[first].plan)
            del self.in_flight[first:]
            self.take(self.scheduler.take_ended())
            self.toy.sampled = self.in_flight[-1].sampled if self.in_flight else self.toy.sampled

    @rule()
    def drain(self) -> None:
        while self.in_flight:
            self.finish_oldest(())

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        lives = number in self.submitted and number not in self.ended
        assert self.scheduler.abort(number) == lives
        self.take(self.scheduler.take_ended())

    @rule()
    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        stats = self.scheduler.stats()
        assert stats.blocks_cached == 0

    @rule(seconds=st.sampled_from([1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def propose(self, count: int, num_right: int) -> None:
        """Drafts for every row, that of an ended sequence included: right ones, then wrong ones."""
        rows, starts, tokens = [], [0], []
        for row, (request, child) in self.rows.items():
            known = self.submitted[request].known(child)
            goes_on = continuation(self.config, known, child, count)
            tokens += goes_on[:num_right] + [(token + 1) % VOCABULARY for token in goes_on[num_right:]]
            rows.append(row)
            starts.append(len(tokens))
        self.scheduler.propose(
            np.array(rows, np.int32), np.array(starts, np.int32), np.array(tokens, np.int64)
        )

    def plan(self) -> Plan | None:
        """Plans a step, and has the toy run it behind the one before it."""
        taken = [step.buffers for step in self.in_flight]
        buffers = next(buffers for buffers in self.buffers if buffers not in taken)
        plan = self.scheduler.plan(buffers, self.now)
        self.take(self.scheduler.take_ended())
        self.scheduler.check()
        if plan is not None:
            placed = slice(0, plan.num_placed)
            sequences = zip(buffers.placed_requests[placed], buffers.placed_children[placed], strict=True)
            for row, (request, child) in zip(buffers.placed_rows[placed], sequences, strict=True):
                self.rows[int(row)] = (int(request), int(child))
            owners = [self.rows[int(row)] for row in buffers.sample_rows[: plan.num_samples]]
            sampled = self.toy.run(plan, buffers, np.array([child for _, child in owners], np.int64))
            self.in_flight.append(InFlight(plan, buffers, owners, sampled))
        return plan

    def step(self, troubles: tuple[tuple[str, int], ...]) -> bool:
        """Plans, and applies the oldest step once no other may join it. Returns whether there was something to do."""
        if self.plan() is not None and len(self.in_flight) < self.config.max_steps_in_flight:
            return True
        if not self.in_flight:
            assert not set(self.submitted) - set(self.ended), "somebody waits and nothing is planned"
            return False
        self.finish_oldest(troubles)
        return True

    def finish_oldest(self, troubles: tuple[tuple[str, int], ...]) -> None:
        step = self.in_flight[0]
        plan, buffers, owners, sampled = step.plan, step.buffers, step.owners, step.sampled
        outcomes = np.full(plan.num_samples, OUTCOME_OK, np.uint8)
        failed_rows: list[int] = []
        for trouble, number in troubles:
            if trouble == "stop" and plan.num_samples > 0:
                outcomes[number % plan.num_samples] = OUTCOME_STOP
            elif trouble == "failed sample" and plan.num_samples > 0:
                outcomes[number % plan.num_samples] = OUTCOME_FAILED
            elif trouble == "failed row":
                failed_rows.append(number % plan.num_batch_rows)
            elif trouble == "abort":
                self.scheduler.abort(number)
            elif trouble == "reset":
                self.scheduler.reset_prefix_cache()
            elif trouble == "wrong order":
                with pytest.raises(StepError):
                    self.scheduler.apply(plan, np.append(sampled, 0), outcomes)
                for later in self.in_flight[1:]:
                    with pytest.raises(StepError, match="follows plan"):
                        self.scheduler.apply(
                            later.plan, later.sampled, np.zeros(len(later.sampled), np.uint8)
                        )
        for row in failed_rows:
            self.toy.spoil(buffers, *buffers.query_starts[row : row + 2].tolist())
        self.toy.spoil_states(plan, buffers, failed_rows)
        ended = self.scheduler.apply(plan, sampled, outcomes, np.array(failed_rows, np.int32))
        del self.in_flight[0]
        reasons = [FinishReason(reason) for reason in buffers.finish_reasons[: plan.num_samples]]
        for (request, child), token, reason in zip(owners, sampled.tolist(), reasons, strict=True):
            if reason in COUNTED:
                self.submitted[request].outputs[child].append(token)
            if reason == FinishReason.STOP:
                self.submitted[request].stopped.add(child)
        self.take(ended)

    def take(self, ended: list[RequestSummary]) -> None:
        """Checks what is said of requests at their end, and their tokens."""
        for summary in ended:
            assert summary.request not in self.ended, "a request ends once"
            self.ended[summary.request] = summary
            entry = self.submitted[summary.request]
            assert summary.prompt_tokens == len(entry.prompt)
            assert summary.output_tokens == sum(map(len, entry.outputs))
            assert not (summary.expired and summary.output_tokens), "what has expired was never prefilled"
            limit = min(entry.max_tokens, self.cap - len(entry.prompt))
            for child, output in enumerate(entry.outputs):
                assert output == continuation(self.config, entry.prompt, child, len(output))
                cut_short = summary.aborted or summary.failed or summary.expired or child in entry.stopped
                assert len(output) == limit or (cut_short and len(output) < limit)
            self.check_hit(summary, entry)

    def check_hit(self, summary: RequestSummary, entry: Submitted) -> None:
        """What was found had been computed for somebody in the same scope."""
        cached = entry.prompt[: summary.cached_tokens]
        assert len(cached) < len(entry.prompt)
        others = [other for number, other in self.submitted.items() if number != summary.request]
        assert not cached or any(
            other.scope == entry.scope and other.known(child)[: len(cached)] == cached
            for other in others
            for child in range(other.num_samples)
        )

    def counts(self) -> tuple[int, ...]:
        stats = self.scheduler.stats()
        return (
            stats.blocks_free,
            stats.blocks_cached,
            stats.blocks_active,
            stats.num_waiting,
            stats.num_running,
            stats.num_requests,
            stats.num_scopes,
        )

    @invariant()
    def accounts_agree(self) -> None:
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_active == stats.blocks_total
        assert stats.blocks_total == self.config.num_blocks - 1
        assert 0 <= stats.host_blocks_free <= stats.host_blocks_total
        assert stats.num_requests == len(self.submitted) - len(self.ended)
        slots = stats.state_slots_free + stats.state_slots_working + stats.state_checkpoints
        assert slots == stats.state_slots_total == max(self.config.num_state_slots - 1, 0)
        assert 0 <= stats.tokens_held <= stats.blocks_active * self.config.block_size

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            if not self.step(()):
                break
        stats = self.scheduler.stats()
        assert set(self.ended) == set(self.submitted)
        assert (stats.num_waiting, stats.num_running, stats.blocks_active) == (0, 0, 0)
        assert stats.host_blocks_free == stats.host_blocks_total
        assert stats.state_slots_working == 0
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.stats().blocks_free == stats.blocks_total
        assert self.scheduler.stats().state_slots_free == stats.state_slots_total
        assert self.scheduler.stats().num_scopes == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=600, stateful_step_count=30, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(1200)
class TestSchedulerMachineLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=5_000, stateful_step_count=80, deadline=None)
