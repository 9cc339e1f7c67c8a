"""Asking a scheduler how it stands changes nothing that it decides."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig
from pykv.step_buffers import StepBuffers

QUESTIONS: dict[str, Callable[[Scheduler], object]] = {
    "stats": lambda scheduler: scheduler.stats(),
    "check": lambda scheduler: scheduler.check(),
    "cached_tokens": lambda scheduler: scheduler.cached_tokens([1, 2, 3]),
    "num_cached_tokens": lambda scheduler: scheduler.num_cached_tokens(0),
}


def tables_after_a_changed_share(
    seed: int, ask: Callable[[Scheduler], object] | None
) -> list[list[list[int]]]:
    """Fills the cache, asks or not, gives a tenant another share, and returns which blocks then make room."""
    source = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=27,
        block_size=2,
        groups=(None, None),
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=24,
        tenant_cache_share=0.3,
        admission="watermark",
        watermark=0.0,
    )
    scheduler, buffers = Scheduler(config), StepBuffers(config)

    def run(first: int, length: int, tenant: bytes, session: str | None = None) -> list[list[int]]:
        scheduler.submit(range(first, first + length), max_tokens=1, tenant=tenant, session=session)
        plan = scheduler.plan(buffers)
        assert plan is not None
        scheduler.apply(plan, np.array([3]), np.array([OUTCOME_OK], np.uint8))
        table: list[list[int]] = buffers.block_tables[:, buffers.table_rows[0], :8].tolist()
        return table

    for number in range(3):
        length, tenant = source.randrange(2, 12), source.choice([b"u", b"v"])
        run(100 + 20 * number, length, tenant, source.choice([None, "s"]))
    if ask is not None:
        ask(scheduler)
    scheduler.set_cache_share(b"u", source.choice([0.08, 0.5, 0.02]))
    return [table for number in range(3) for table in run(300 + 20 * number, source.randrange(4, 14), b"w")]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_before_a_share_changes_moves_no_block(question: str) -> None:
    for seed in range(100):
        asked = tables_after_a_changed_share(seed, QUESTIONS[question])
        assert asked == tables_after_a_changed_share(seed, None), seed


def test_what_a_request_has_found_is_told_while_it_lives() -> None:
    config = SchedulerConfig(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=32)
    scheduler, buffers = Scheduler(config), StepBuffers(config)
    for _ in range(2):
        request, told = scheduler.submit(range(9), max_tokens=2), []
        while (plan := scheduler.plan(buffers)) is not None:
            told.append(scheduler.num_cached_tokens(request))
            ended = scheduler.apply(plan, np.array([3]), np.array([OUTCOME_OK], np.uint8))
        told.append(scheduler.num_cached_tokens(request))
    assert told == [0, 8, None]
    assert [summary.cached_tokens for summary in ended] == [8]
