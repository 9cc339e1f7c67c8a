"""Batch sizes for which a decode is recorded, and the rows that fill a batch up to one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.scheduler import Plan, StepBuffers

__all__ = ["bucket_of", "decode_buckets", "fill_up"]


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then two a doubling (12, 16, 24, 32, …), and the largest batch that there can be."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2 if power >= 8 else power)}
    return (*sorted(size for size in sizes if size < max_num_seqs), max_num_seqs)


def bucket_of(num_rows: int, buckets: Sequence[int]) -> int | None:
    """The least bucket that holds so many rows; None where none does."""
    return next((bucket for bucket in buckets if bucket >= num_rows), None)


def is_decode(plan: Plan) -> bool:
    """Whether each row computes one token, and no more logits are wanted than rows."""
    return plan.num_tokens == plan.num_batch_rows and 0 < plan.num_samples <= plan.num_batch_rows


def fill_up(buffers: StepBuffers, plan: Plan, bucket: int) -> None:
    """Writes rows behind those of the plan that compute one token each, of nothing: slot -1, length 0.

    What the plan holds is left alone; the next plan writes over what is added.
    """
    rows = slice(plan.num_batch_rows, bucket)
    buffers.token_ids[rows] = 0
    buffers.positions[rows] = 0
    buffers.slot_mapping[..., rows] = -1
    buffers.seq_lens[rows] = 0
    buffers.table_rows[rows] = 0
    buffers.query_starts[plan.num_batch_rows + 1 : bucket + 1] = np.arange(
        plan.num_batch_rows + 1, bucket + 1
    )
    buffers.sample_indices[plan.num_samples : bucket] = 0
