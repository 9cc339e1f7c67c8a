"""Which tokens of a step need logits for the sake of prompt log probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pykv.engine.prompt_scores import PromptScores
from pykv.engine.request import Sequence
from pykv.scheduler import Plan, StepBuffers


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """The part of one batch row whose logits score its prompt.

    Attributes:
        scores: where the entries go.
        first_position: of the first token.
        indices: int64 [n], the tokens in the step.
    """

    scores: PromptScores
    first_position: int
    indices: npt.NDArray[np.int64]


def scored_rows(plan: Plan, buffers: StepBuffers, by_row: Items[Sequence | None]) -> list[ScoredRow]:
    """Returns what the step's batch rows have to score."""
    found = []
    for batch_row in range(plan.num_batch_rows):
        sequence = by_row[buffers.table_rows[batch_row]]
        if sequence is None or sequence.request.prompt_scores is None:
            continue
        first_token, end_token = buffers.query_starts[batch_row : batch_row + 2].tolist()
        first = int(buffers.positions[first_token])
        count = sequence.request.prompt_scores.wanted(first, first + end_token - first_token)
        if count:
            indices = np.arange(first_token, first_token + count, dtype=np.int64)
            found.append(ScoredRow(sequence.request.prompt_scores, first, indices))
    return found


def add_scores(rows: list[ScoredRow], logits: torch.Tensor) -> None:
    """Hands the logits, which follow each other row by row, to the scores."""
    begin = 0
    for row in rows:
        end = begin + len(row.indices)
        row.scores.add(row.first_position, logits[begin:end])
        begin = end
