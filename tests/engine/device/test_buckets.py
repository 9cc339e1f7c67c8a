"""Which batch sizes are recorded, and how a batch is filled up to one."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.engine.device.buckets import bucket_of, decode_buckets, fill_up, is_decode
from pykv.scheduler import Scheduler, SchedulerConfig, StepBuffers


def test_sizes_grow_by_half_at_most_and_end_at_the_largest_batch() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(5) == (1, 2, 4, 5)
    assert decode_buckets(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert decode_buckets(200) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 200)


@pytest.mark.parametrize("largest", [1, 7, 8, 100, 256])
def test_every_batch_has_the_least_bucket_that_holds_it(largest: int) -> None:
    buckets = decode_buckets(largest)
    for rows in range(1, largest + 1):
        bucket = bucket_of(rows, buckets)
        assert bucket is not None
        assert bucket >= rows
        assert not any(rows <= smaller < bucket for smaller in buckets)
    assert bucket_of(largest + 1, buckets) is None


@pytest.mark.parametrize("groups", [(None,), (None, 6)])
def test_rows_are_added_that_compute_nothing_and_the_plan_is_left_alone(
    groups: tuple[int | None, ...],
) -> None:
    config = SchedulerConfig(
        num_blocks=64,
        block_size=4,
        groups=groups,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=32,
    )
    scheduler, buffers = Scheduler(config), StepBuffers(config)
    for length in (9, 5, 6):
        scheduler.submit(range(100 * length, 101 * length), max_tokens=3)
    prefill = scheduler.plan(buffers)
    assert prefill is not None
    assert not is_decode(prefill)
    scheduler.apply(prefill, np.full(3, 7), np.zeros(3, np.uint8))
    plan = scheduler.plan(buffers)
    assert plan is not None
    assert is_decode(plan)
    names = ("token_ids", "positions", "seq_lens", "table_rows", "sample_indices", "block_tables")
    before = {name: getattr(buffers, name)[..., :3].copy() for name in (*names, "slot_mapping")}
    fill_up(buffers, plan, 8)
    for name, array in before.items():
        assert np.array_equal(getattr(buffers, name)[..., :3], array)
    assert (buffers.slot_mapping[..., 3:8] == -1).all()
    assert not buffers.seq_lens[3:8].any()
    assert buffers.query_starts[:9].tolist() == list(range(9))
    assert not buffers.sample_indices[3:8].any()
    scheduler.apply(plan, np.full(3, 7), np.zeros(3, np.uint8))
    assert scheduler.plan(buffers) is not None
