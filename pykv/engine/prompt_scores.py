"""Collects the log probabilities of one prompt's tokens, chunk by chunk."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pykv.sampling.logprobs import token_logprobs
from pykv.sampling.token_logprobs import TokenLogprobs

_ROWS_AT_ONCE = 256


class PromptScores:
    """One entry a prompt token; the first has none, since nothing comes before it.

    Args:
        prompt: int32 [num_prompt_tokens].
        num_top: how many of the likeliest tokens each entry names.
    """

    def __init__(self, prompt: npt.NDArray[np.int32], num_top: int) -> None:
        self._targets = torch.from_numpy(prompt.astype(np.int64))
        self._num_top = num_top
        self._entries: list[TokenLogprobs | None] = [None] * len(prompt)
        self._missing = len(prompt) - 1

    def wanted(self, first: int, end: int) -> int:
        """Returns how many positions of [first, end), from `first` on, predict a prompt token.

        None do once all entries are there: a preempted sequence computes its prompt again.
        """
        if self._missing == 0:
            return 0
        return max(0, min(end, len(self._entries) - 1) - first)

    def add(self, first: int, logits: torch.Tensor) -> None:
        """Takes the logits at the positions from `first` on.

        Args:
            logits: float32 [n, vocab_size].
        """
        targets = self._targets[first + 1 : first + 1 + len(logits)].to(logits.device)
        for begin in range(0, len(logits), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            rows = logits[part]
            entries = token_logprobs(rows, targets[part], [self._num_top] * len(rows))
            place = first + 1 + begin
            self._missing -= self._entries[place : place + len(rows)].count(None)
            self._entries[place : place + len(rows)] = entries

    def entries(self) -> tuple[TokenLogprobs | None, ...]:
        """Returns the entries so far."""
        return tuple(self._entries)
