"""Runs of the real scheduler, with a model that always says the same token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import pykv


@dataclass(frozen=True)
class BatchRow:
    """What a step computes of one sequence: some of its tokens, from a position on."""

    request: int
    sample: int
    row: int
    first_position: int
    num_tokens: int


class Run:
    """A scheduler and a model that always says the same token, so that each request runs up to its limit."""

    def __init__(self, **options: object) -> None:
        self.config = pykv.SchedulerConfig(**options)
        self.scheduler = pykv.Scheduler(self.config)
        self.buffers = pykv.StepBuffers(self.config)
        self.owners: dict[int, tuple[int, int]] = {}

    def steps(self, before_each: Callable[[int], None] = lambda step: None) -> Iterator[pykv.Plan]:
        """Yields each step between its `plan` and its `apply`, until nothing lives."""
        step = 0
        before_each(step)
        while (plan := self.scheduler.plan(self.buffers)) is not None:
            placed = (self.buffers.placed_rows, self.buffers.placed_requests, self.buffers.placed_children)
            for row, *owner in zip(*(array[: plan.num_placed].tolist() for array in placed), strict=True):
                self.owners[row] = (owner[0], owner[1])
            yield plan
            ok = np.full(plan.num_samples, pykv.OUTCOME_OK, np.uint8)
            self.scheduler.apply(plan, np.zeros(plan.num_samples, np.int64), ok)
            step += 1
            before_each(step)

    def batch(self, plan: pykv.Plan) -> list[BatchRow]:
        starts = self.buffers.query_starts[: plan.num_batch_rows + 1].tolist()
        rows = self.buffers.table_rows[: plan.num_batch_rows].tolist()
        return [
            BatchRow(*self.owners[row], row, int(self.buffers.positions[start]), end - start)
            for row, start, end in zip(rows, starts, starts[1:], strict=False)
        ]

    def table(self, row: int, num_tokens: int) -> list[int]:
        num_blocks = -(-num_tokens // self.config.block_size)
        return self.buffers.block_tables[row, :num_blocks].tolist()
