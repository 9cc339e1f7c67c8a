"""Draws one token a row from unnormalised weights by inverting their running sum."""

from __future__ import annotations

import torch

_SPAN = 256  # tokens that are summed first; the running sum is then followed inside one span only


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns int64 [n]: the first token at which the running sum exceeds uniform * total.

    A token of weight 0 is never drawn.

    Args:
        weights: float32 [n, vocab_size], finite, not negative, not all 0.
        uniforms: float64 [n] in [0, 1).
    """
    spans = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _SPAN)).view(len(weights), -1, _SPAN)
    sums = spans.sum(-1).double().cumsum(-1)
    targets = uniforms[:, None] * sums[:, -1:]
    chosen = _first_above(sums, targets)
    before = torch.where(chosen > 0, sums.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = spans[torch.arange(len(spans), device=weights.device), chosen[:, 0]].double().cumsum(-1)
    return (chosen * _SPAN + _first_above(inside, targets - before))[:, 0]


def _first_above(sums: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns int64 [n, 1]: the first place whose sum is above the target, or the last that adds anything."""
    first = torch.searchsorted(sums, targets, right=True)
    last_that_adds = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(first, last_that_adds)
