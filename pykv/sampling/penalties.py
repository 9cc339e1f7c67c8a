"""Repetition, presence and frequency penalties over dense token counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TokenCounts:
    """Which tokens each row's prompt holds, and how often its output holds each.

    The two tables, bool and int32 [max_num_seqs, vocab_size], are made when the first such row is placed.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._in_prompt = torch.zeros((0, 0), dtype=torch.bool)
        self._in_output = torch.zeros((0, 0), dtype=torch.int32)

    def place(self, row: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        """Counts one row anew."""
        if not self._in_prompt.numel():
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._in_output = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._in_prompt[row] = self._counted(prompt_token_ids) > 0
        self._in_output[row] = self._counted(output_token_ids)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Counts one more output token in each of the rows, which differ; int64 [n] both."""
        self._in_output[rows, token_ids] += 1

    def penalize(self, logits: torch.Tensor, rows: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
        """Returns the logits after the penalties.

        Args:
            logits: float32 [n, vocab_size].
            rows: int64 [n].
            penalties: float32 [3, n]: repetition, presence, frequency.

        Source: repetition: Keskar et al., CTRL, 2019, section 4.1, with the sign of the logit heeded;
            presence and frequency: the OpenAI API reference, "Frequency and presence penalties".
        """
        repetition, presence, frequency = penalties[:, :, None]
        in_output = self._in_output[rows]
        seen = self._in_prompt[rows] | (in_output > 0)
        divisors = torch.where(logits > 0, repetition, 1.0 / repetition)
        logits = torch.where(seen, logits / divisors, logits)
        penalized: torch.Tensor = logits - presence * (in_output > 0) - frequency * in_output
        return penalized

    def _counted(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self._device)
        return torch.bincount(ids, minlength=self._shape[1])
