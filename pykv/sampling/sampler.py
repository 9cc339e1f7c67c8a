"""Samples one token a row for a whole batch, without a loop over the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pykv.sampling.draw import draw
from pykv.sampling.filters import lowest_kept
from pykv.sampling.logprobs import token_logprobs
from pykv.sampling.penalties import TokenCounts
from pykv.sampling.philox import uniforms
from pykv.sampling.row_parameters import Feature, Placement, RowParameters
from pykv.sampling.token_bias import TokenBias
from pykv.sampling.token_logprobs import TokenLogprobs

Indices = npt.NDArray[np.intp]
_ADJUSTED = Feature.PENALIZED | Feature.BIASED | Feature.MIN_TOKENS


@dataclass(frozen=True, slots=True)
class Samples:
    """What one step sampled.

    Attributes:
        token_ids: int64 [num_samples]; 0 where failed.
        failed: bool [num_samples]: the model gave no finite largest logit.
        logprobs: by the index of the sample, for those that asked.
    """

    token_ids: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Keeps the parameters of every running sequence by its table row.

    Args:
        vocab_size: of the model's logits.
        max_num_seqs: rows.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._rows = RowParameters(max_num_seqs)
        self._device = device
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        self._bias = TokenBias(max_num_seqs, device)
        self._bans = TokenBias(max_num_seqs, device)

    def place(self, row: int, placement: Placement) -> None:
        """Gives a row to a sequence; what it held before is forgotten."""
        self._rows.place(row, placement)
        features = Feature(int(self._rows.features[row]))
        if features & Feature.PENALIZED:
            prompt = placement.prompt_token_ids.astype(np.int64)
            self._counts.place(row, prompt, placement.output_token_ids)  # type: ignore[arg-type]
        if features & Feature.BIASED:
            self._bias.place(row, placement.params.logit_bias)
        if features & Feature.MIN_TOKENS:
            self._bans.place(row, dict.fromkeys(sorted(placement.ending_token_ids), -np.inf))

    def sample(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> Samples:
        """Samples one token for each row of logits.

        Args:
            logits: float32 [num_samples, vocab_size], may be changed.
            rows: [num_samples], all different.
            positions: [num_samples], the place in its sequence that each token will take.
        """
        features = self._rows.features[rows]
        needed = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        asked = _having(Feature.LOGPROBS, features)
        unchanged = logits[self._to_device(asked)] if len(asked) else logits
        if needed & _ADJUSTED:
            self._adjust(logits, rows, positions, features)
        token_ids, failed = _likeliest(logits)
        if needed & Feature.RANDOM:
            self._draw(token_ids, logits, rows, positions, _having(Feature.RANDOM, features, ~failed))
        if needed & Feature.PENALIZED:
            self._count(token_ids, rows, _having(Feature.PENALIZED, features, ~failed))
        return Samples(token_ids, failed, self._logprobs(unchanged, token_ids, rows, asked))

    def _adjust(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        features: npt.NDArray[np.uint8],
    ) -> None:
        penalized = _having(Feature.PENALIZED, features)
        if len(penalized):
            self._penalize(logits, rows, penalized)
        biased = _having(Feature.BIASED, features)
        if len(biased):
            self._bias.add_to(logits, self._to_device(biased), self._to_device(rows[biased]))
        too_short = positions < self._rows.first_free_positions[rows]
        banned = _having(Feature.MIN_TOKENS, features, too_short)
        if len(banned):
            self._bans.add_to(logits, self._to_device(banned), self._to_device(rows[banned]))

    def _penalize(self, logits: torch.Tensor, rows: npt.NDArray[np.int32], samples: Indices) -> None:
        chosen, values = rows[samples], self._rows
        penalties = [values.repetition_penalties, values.presence_penalties, values.frequency_penalties]
        stacked = self._to_device(np.stack([penalty[chosen] for penalty in penalties]))
        places = self._to_device(samples)
        logits[places] = self._counts.penalize(logits[places], self._to_device(chosen), stacked)

    def _draw(
        self,
        token_ids: npt.NDArray[np.int64],
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        samples: Indices,
    ) -> None:
        """Replaces the tokens of the random samples."""
        if not len(samples):
            return
        chosen, values = rows[samples], self._rows
        scaled = logits[self._to_device(samples)]
        scaled -= scaled.amax(-1, keepdim=True)
        scaled /= self._to_device(values.temperatures[chosen])[:, None]
        weights = scaled.exp()
        if np.any(values.features[chosen] & Feature.FILTERED):
            filters = (values.top_ks[chosen], values.top_ps[chosen], values.min_ps[chosen])
            floors = lowest_kept(scaled, *filters)
            weights = torch.where(scaled >= floors, weights, 0.0)
        numbers = uniforms(values.seeds[chosen], values.children[chosen], positions[samples])
        token_ids[samples] = draw(weights, self._to_device(numbers)).cpu().numpy()

    def _count(self, token_ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int32], samples: Indices) -> None:
        self._counts.count(self._to_device(rows[samples]), self._to_device(token_ids[samples]))

    def _logprobs(
        self,
        logits: torch.Tensor,
        token_ids: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int32],
        samples: Indices,
    ) -> dict[int, TokenLogprobs]:
        if not len(samples):
            return {}
        num_top = self._rows.num_top_logprobs[rows[samples]].tolist()
        entries = token_logprobs(logits, self._to_device(token_ids[samples]), num_top)
        return dict(zip(samples.tolist(), entries, strict=True))

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        if values.dtype == np.int32:
            values = values.astype(np.int64)
        return torch.from_numpy(values).to(self._device)


def _having(
    feature: Feature, features: npt.NDArray[np.uint8], among: npt.NDArray[np.bool_] | bool = True
) -> Indices:
    """Returns the indices of the samples with a feature."""
    return np.flatnonzero(((features & feature) != 0) & among)


def _likeliest(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns each row's likeliest token, the first of equals, and whether its logit is no finite number.

    A NaN counts as the largest, so one NaN anywhere makes its row fail.
    """
    if logits.device.type == "cpu":  # numpy's is six times as fast as torch's here
        values = logits.numpy()
        token_ids = values.argmax(-1)
        largest = np.take_along_axis(values, token_ids[:, None], -1)[:, 0]
    else:
        token_ids, largest = _likeliest_on_device(logits)
    failed = ~np.isfinite(largest)
    return np.where(failed, 0, token_ids).astype(np.int64), failed


def _likeliest_on_device(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Returns each row's likeliest token and its logit, for which the device is waited for once.

    Both are numbers that a float64 holds.
    """
    token_ids = logits.argmax(-1, keepdim=True)
    both = torch.cat([token_ids.double(), logits.gather(1, token_ids).double()], dim=1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1]
