"""Log probabilities of given tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pykv.sampling.token_logprobs import LOWEST_LOGPROB, TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Returns one entry a row.

    Args:
        logits: float32 [n, vocab_size], as the model gave them.
        token_ids: int64 [n]: the token whose log probability is asked for.
        num_top: how many of the likeliest tokens each row asks for.
    """
    totals = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top = logits.topk(min(max(num_top, default=0), logits.shape[1]), dim=-1)
    columns = zip(
        token_ids.tolist(),
        _finite(chosen - totals)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        _finite(top.values - totals).tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token_id, logprob, rank, ids, values, count in columns
    ]


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
