"""Two steps in flight: a plan that comes to nothing takes nothing."""

from __future__ import annotations

import numpy as np

from pykv.scheduler import OUTCOME_OK, Plan, Scheduler, SchedulerConfig
from pykv.step_buffers import StepBuffers


def test_no_group_keeps_blocks_of_a_chunk_for_which_another_group_has_none() -> None:
    config = SchedulerConfig(
        num_blocks=12,
        block_size=3,
        groups=(1, 3),
        max_num_batched_tokens=8,
        max_steps_in_flight=2,
        queue_order="priority",
        preempt_lower_ranks=True,
    )
    scheduler = Scheduler(config)
    in_flight: list[Plan] = []

    def plan(now: float = 0.0) -> bool:
        planned = scheduler.plan(StepBuffers(config), now)
        in_flight.extend([planned] if planned else [])
        return planned is not None

    def apply() -> None:
        step = in_flight.pop(0)
        scheduler.apply(step, np.full(step.num_samples, 3), np.full(step.num_samples, OUTCOME_OK, np.uint8))

    scheduler.submit([2], priority=1, deadline=1.0)
    scheduler.submit([2, 2, 0, 0], priority=1)
    long = scheduler.submit([place % 4 for place in range(28)])
    plan(10.0)
    scheduler.pause(long)
    apply()
    plan()
    apply()
    scheduler.resume(long)
    plan()
    active = scheduler.stats().blocks_active
    assert not plan()
    assert scheduler.stats().blocks_active == active
    apply()
    assert plan()
    scheduler.check()


class Pair:
    """A scheduler with two steps in flight; sample k of a request always gets token k."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler, self.config = Scheduler(config), config
        self.in_flight: list[tuple[Plan, StepBuffers]] = []
        self.samples: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def plan(self) -> bool:
        buffers = StepBuffers(self.config)
        planned = self.scheduler.plan(buffers)
        if planned is None:
            return False
        placed = slice(planned.num_placed)
        rows, children = buffers.placed_rows[placed], buffers.placed_children[placed]
        self.samples.update(zip(rows.tolist(), children.tolist(), strict=True))
        for row in range(planned.num_batch_rows):
            table_row = int(buffers.table_rows[row])
            self.held[table_row] = np.count_nonzero(buffers.block_tables[table_row, : buffers.seq_lens[row]])
        self.in_flight.append((planned, buffers))
        return True

    def apply(self, failed_rows: tuple[int, ...] = ()) -> None:
        planned, buffers = self.in_flight.pop(0)
        rows = buffers.sample_rows[: planned.num_samples].tolist()
        outcomes = np.full(planned.num_samples, OUTCOME_OK, np.uint8)
        tokens = np.array([self.samples[row] for row in rows], np.int64)
        self.scheduler.apply(planned, tokens, outcomes, failed_rows=np.array(failed_rows, np.int32))
        self.scheduler.check()


def test_samples_that_met_an_equal_prompt_late_give_back_what_left_their_window() -> None:
    config = SchedulerConfig(
        num_blocks=300,
        block_size=1,
        groups=(1,),
        max_num_batched_tokens=4,
        max_chunk_tokens=1,
        max_model_len=150,
        max_steps_in_flight=2,
    )
    pair = Pair(config)
    pair.scheduler.submit([1, 1], num_samples=2, max_tokens=100)
    pair.plan()
    pair.apply()
    pair.plan()
    pair.scheduler.submit([1, 1], max_tokens=100)
    pair.plan()
    pair.apply()
    pair.apply()
    pair.plan()
    pair.plan()
    pair.apply()
    for _ in range(60):
        while len(pair.in_flight) < 2 and pair.plan():
            pass
        pair.apply()
    assert len(pair.held) == 3
    assert max(pair.held.values()) <= 3


def test_who_shared_what_a_failed_row_computed_breaks_no_chain_of_windows() -> None:
    config = SchedulerConfig(
        num_blocks=12, block_size=1, groups=(1,), max_chunk_tokens=1, max_steps_in_flight=2
    )
    pair = Pair(config)
    pair.scheduler.submit([2])
    pair.scheduler.submit([2, 2])
    pair.plan()
    pair.scheduler.submit([2, 2, 0])
    pair.plan()
    pair.apply(failed_rows=(1,))
    pair.apply()
    for _ in range(40):
        if pair.plan():
            pair.apply()
    assert pair.held
