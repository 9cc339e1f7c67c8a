"""The log probabilities at one position, as they are given to the caller."""

from __future__ import annotations

from dataclasses import dataclass

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities at one position, by the model alone: before penalties, bias and temperature.

    Attributes:
        token_id: the token at this position.
        logprob: its natural log probability, at least LOWEST_LOGPROB.
        rank: 1 + the number of likelier tokens.
        top_token_ids, top_logprobs: the likeliest tokens, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
