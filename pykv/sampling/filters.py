"""top-k, top-p and min-p as one number a row: the lowest logit that stays.

Tokens exactly as likely as the last one that stays also stay, so that the result does not depend on the order
of equal tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_CANDIDATES = 512  # the nucleus is looked for among so many of the likeliest tokens before all are sorted


def lowest_kept(
    logits: torch.Tensor,
    top_ks: npt.NDArray[np.int64],
    top_ps: npt.NDArray[np.float32],
    min_ps: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Returns float32 [n, 1]: the lowest logit that each row keeps.

    The limits are in host memory, so that what is to be computed is known without waiting for the device. For top-p
    it is waited for all the same: how many logits must be sorted depends on them.

    Args:
        logits: float32 [n, vocab_size], after the temperature, each row's largest is 0.
        top_ks: [n]; 0 = all.
        top_ps: [n] in (0, 1], of what top_k and min_p left.
        min_ps: [n] in [0, 1].

    Source: top-p: Holtzman et al., The curious case of neural text degeneration, ICLR 2020, section 3.1;
        min-p: Nguyen et al., Turning up the heat, 2024, section 3.
    """
    device = logits.device
    floors = torch.from_numpy(min_ps).to(device).log()[:, None]
    if np.any(top_ks > 0):
        floors = torch.maximum(floors, _kth_largest(logits, top_ks))
    narrowed = np.flatnonzero(top_ps < 1.0)
    if len(narrowed):
        rows = torch.from_numpy(narrowed).to(device)
        masses = torch.from_numpy(top_ps[narrowed, None]).to(device)
        floors = floors.index_copy(0, rows, _nucleus_floor(logits[rows], masses, floors[rows]))
    return floors


def _kth_largest(logits: torch.Tensor, top_ks: npt.NDArray[np.int64]) -> torch.Tensor:
    limits = np.minimum(top_ks, logits.shape[1])
    largest = logits.topk(int(limits.max()), dim=-1).values
    places = torch.from_numpy(np.maximum(limits - 1, 0)[:, None]).to(logits.device)
    is_limited = torch.from_numpy(top_ks[:, None] > 0).to(logits.device)
    return torch.where(is_limited, largest.gather(1, places), -torch.inf)


def _nucleus_floor(logits: torch.Tensor, top_ps: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    totals = torch.where(logits >= floors, logits.exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    candidates = logits.topk(min(_CANDIDATES, logits.shape[1]), dim=-1).values
    found, reached = _floor_among(candidates, top_ps * totals, floors)
    unreached = (~reached).nonzero()[:, 0]
    if len(unreached):
        ordered = logits[unreached].sort(dim=-1, descending=True).values
        complete, _ = _floor_among(ordered, (top_ps * totals)[unreached], floors[unreached])
        found = found.index_copy(0, unreached, complete)
    return found


def _floor_among(
    ordered: torch.Tensor, masses: torch.Tensor, floors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logit at which the likeliest tokens first weigh `masses`, and whether they do at all.

    Args:
        ordered: float32 [n, m], descending.
        masses: float64 [n, 1].
        floors: float32 [n, 1]: tokens below weigh nothing.
    """
    weights = torch.where(ordered >= floors, ordered.exp(), 0.0)
    short = weights.cumsum(-1, dtype=torch.float64) < masses
    last = short.sum(-1, keepdim=True)
    reached = last[:, 0] < ordered.shape[1]
    found = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1))
    return torch.maximum(found, floors), reached
