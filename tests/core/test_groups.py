"""Layer groups through the Python face: a block table and slots for each, and windows that give blocks back."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import CapacityError, ConfigError
from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers


def grouped(*groups: int | None, **changes: object) -> SchedulerConfig:
    options: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "groups": groups,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 10_000,
        "admission": "watermark",
    }
    return SchedulerConfig(**(options | changes))  # type: ignore[arg-type]


def test_each_group_has_its_own_table_and_slots_and_no_block_twice() -> None:
    scheduler = Scheduler(grouped(None, 6))
    buffers = StepBuffers(scheduler.config)
    assert buffers.slot_mapping.shape == (2, 16)
    assert buffers.block_tables.shape == (2, 2, scheduler.config.max_blocks_per_seq)
    scheduler.submit(range(100, 112), max_tokens=2)
    plan = scheduler.plan(buffers)
    assert plan is not None
    tables = buffers.block_tables[:, 0, :3]
    assert len(set(tables.ravel().tolist())) == 6
    positions = buffers.positions[:12]
    for group in range(2):
        slots = tables[group][positions // 4] * 4 + positions % 4
        np.testing.assert_array_equal(buffers.slot_mapping[group, :12], slots)


def test_what_left_the_window_is_the_null_block_in_every_buffer() -> None:
    scheduler = Scheduler(grouped(None, 6))
    buffers = [StepBuffers(scheduler.config), StepBuffers(scheduler.config)]
    scheduler.submit(range(200, 240), max_tokens=20)
    step = 0
    while plan := scheduler.plan(buffers[step % 2]):
        arrays = buffers[step % 2]
        query = int(arrays.positions[: plan.num_tokens].min())
        full, window = arrays.block_tables[:, arrays.table_rows[0]]
        first = max(0, query + 1 - 6) // 4
        last = -(-int(arrays.seq_lens[0]) // 4)
        assert (window[:first] == 0).all()
        assert (window[first:last] > 0).all()
        assert (full[:last] > 0).all()
        scheduler.apply(plan, np.full(plan.num_samples, 7), np.full(plan.num_samples, OUTCOME_OK, np.uint8))
        scheduler.check()
        step += 1
    assert scheduler.stats().blocks_active == 0


def test_the_longest_sequence_is_what_all_groups_hold_together() -> None:
    assert grouped(None, num_blocks=20).max_seq_len == 76
    assert grouped(None, None, num_blocks=20).max_seq_len == 36
    assert grouped(20, num_blocks=20).max_seq_len == 10_000
    scheduler = Scheduler(grouped(None, 20, num_blocks=20))
    assert scheduler.config.max_seq_len == 36
    with pytest.raises(CapacityError, match="total of 36 tokens"):
        scheduler.submit(range(36))


@pytest.mark.parametrize("groups", [(), (0,), (-3,), (True,), ("full",), [None], (None,) * 65])
def test_groups_that_are_none_are_refused_by_name(groups: object) -> None:
    with pytest.raises(ConfigError, match="groups is"):
        SchedulerConfig(num_blocks=8, groups=groups)  # type: ignore[arg-type]
