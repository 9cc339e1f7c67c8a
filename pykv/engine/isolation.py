"""When the model raises, finds out whose fault it is: each batch row of the step runs again, alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pykv.engine.runner import Runner
from pykv.engine.step_tensors import StepTensors, StepViews
from pykv.scheduler import Plan, StepBuffers


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What the model gave for one step.

    Attributes:
        logits: float32 [num_logits, vocab_size]; 0 where the batch row failed.
        failed_rows: the batch rows at which the model raised, each with its error.
    """

    logits: torch.Tensor
    failed_rows: dict[int, Exception]


def forward_isolated(
    runner: Runner, views: StepViews, plan: Plan, logits_indices: npt.NDArray[np.int64]
) -> StepLogits:
    """Runs the step; where the model raises, runs each batch row alone, in order.

    Running a row twice is harmless: it writes the same KV to the same slots.

    Raises:
        Exception: the model raises on every row and on a step of one harmless token too: it is broken.
    """
    try:
        return StepLogits(runner.forward(views.step(plan, logits_indices)), {})
    except Exception as error:
        if plan.num_batch_rows == 1:
            result = _nothing(runner, logits_indices, {0: error})
        else:
            result = _row_by_row(runner, views, plan, logits_indices)
    if len(result.failed_rows) == plan.num_batch_rows:
        runner.forward(_harmless_step(runner))
    return result


def rows_of(plan: Plan, buffers: StepBuffers, batch_row: int) -> set[int]:
    """Returns the table rows of the sequences that a batch row computes for: its own, and those that sample it."""
    first, end = buffers.query_starts[batch_row : batch_row + 2].tolist()
    indices = buffers.sample_indices[: plan.num_samples]
    sampling = buffers.sample_rows[: plan.num_samples][(indices >= first) & (indices < end)]
    return {int(buffers.table_rows[batch_row]), *sampling.tolist()}


def _row_by_row(
    runner: Runner, views: StepViews, plan: Plan, logits_indices: npt.NDArray[np.int64]
) -> StepLogits:
    result = _nothing(runner, logits_indices, {})
    starts = views.buffers.query_starts
    for row in range(plan.num_batch_rows):
        wanted = np.flatnonzero((logits_indices >= starts[row]) & (logits_indices < starts[row + 1]))
        try:
            logits = runner.forward(views.alone(row, logits_indices[wanted] - starts[row]))
        except Exception as error:
            result.failed_rows[row] = error
        else:
            result.logits[torch.from_numpy(wanted)] = logits
    return result


def _nothing(
    runner: Runner, logits_indices: npt.NDArray[np.int64], failed_rows: dict[int, Exception]
) -> StepLogits:
    logits = torch.zeros((len(logits_indices), runner.vocab_size), device=runner.device)
    return StepLogits(logits, failed_rows)


def _harmless_step(runner: Runner) -> StepTensors:
    """One token that reads the null block and writes nowhere."""
    device = runner.device

    def whole(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepTensors(
        token_ids=whole([0], torch.int64),
        positions=whole([0], torch.int64),
        slot_mapping=whole([-1], torch.int64),
        block_tables=whole([0], torch.int32)[None],
        seq_lens=whole([1], torch.int32),
        table_rows=whole([0], torch.int32),
        query_starts=whole([0, 1], torch.int32),
        logits_indices=whole([0], torch.int64),
    )
