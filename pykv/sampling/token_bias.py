"""A few numbers a row that are added to the logits of a few tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class TokenBias:
    """Token ids and what to add, by row; short rows are padded with nothing added to token 0.

    Args:
        max_num_seqs: rows.
        device: of the logits.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._token_ids = torch.zeros((max_num_seqs, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((max_num_seqs, 0), dtype=torch.float32, device=device)

    def place(self, row: int, bias: Mapping[int, float]) -> None:
        """Sets one row; the table becomes as wide as its widest row so far."""
        missing = len(bias) - self._token_ids.shape[1]
        if missing > 0:
            self._token_ids = torch.nn.functional.pad(self._token_ids, (0, missing))
            self._values = torch.nn.functional.pad(self._values, (0, missing))
        self._token_ids[row] = 0
        self._values[row] = 0.0
        device = self._values.device
        self._token_ids[row, : len(bias)] = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._values[row, : len(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def add_to(self, logits: torch.Tensor, samples: torch.Tensor, rows: torch.Tensor) -> None:
        """Changes logits[samples[i]] by what row rows[i] says.

        Args:
            logits: float32 [num_samples, vocab_size], changed in place.
            samples, rows: int64 [n].
        """
        places = (samples[:, None], self._token_ids[rows])
        logits.index_put_(places, self._values[rows], accumulate=True)
