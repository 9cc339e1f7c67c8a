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
        queue_order="fair_share",
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

    scheduler.submit([2], tenant=b"u", deadline=1.0)
    scheduler.submit([2, 2, 0, 0], tenant=b"u")
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
