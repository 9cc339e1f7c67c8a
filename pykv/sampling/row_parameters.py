"""The parameters of all running sequences as arrays over their table rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np

from pykv.sampling.params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this one count as 0."""


class Feature(IntFlag):
    """What a row needs beyond the likeliest token."""

    RANDOM = 1
    FILTERED = 2
    PENALIZED = 4
    BIASED = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence that gets a row.

    Attributes:
        params: of its request.
        seed: of its request, drawn where the caller gave none.
        child: which of the request's samples it is.
        prompt_token_ids, output_token_ids: its tokens so far.
        ending_token_ids: sampling one of these ends it.
    """

    params: SamplingParams
    seed: int
    child: int
    prompt_token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    output_token_ids: list[int] = field(default_factory=list)
    ending_token_ids: frozenset[int] = frozenset()


class RowParameters:
    """One array a parameter, [max_num_seqs]; a row keeps its values until it is given away again."""

    def __init__(self, max_num_seqs: int) -> None:
        self.features = np.zeros(max_num_seqs, np.uint8)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.children = np.zeros(max_num_seqs, np.int64)
        self.temperatures = np.ones(max_num_seqs, np.float32)
        self.top_ks = np.zeros(max_num_seqs, np.int64)
        self.top_ps = np.ones(max_num_seqs, np.float32)
        self.min_ps = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalties = np.ones(max_num_seqs, np.float32)
        self.presence_penalties = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalties = np.zeros(max_num_seqs, np.float32)
        self.first_free_positions = np.zeros(max_num_seqs, np.int64)  # from here on the sequence may end
        self.num_top_logprobs = np.zeros(max_num_seqs, np.int64)

    def place(self, row: int, placement: Placement) -> None:
        """Sets all values of one row."""
        params = placement.params
        self.features[row] = features_of(params)
        self.seeds[row] = placement.seed
        self.children[row] = placement.child
        self.temperatures[row] = params.temperature
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.min_ps[row] = params.min_p
        self.repetition_penalties[row] = params.repetition_penalty
        self.presence_penalties[row] = params.presence_penalty
        self.frequency_penalties[row] = params.frequency_penalty
        self.first_free_positions[row] = len(placement.prompt_token_ids) + params.min_tokens
        self.num_top_logprobs[row] = params.logprobs or 0


def features_of(params: SamplingParams) -> Feature:
    """Returns what these parameters need."""
    random = params.temperature >= GREEDY_BELOW
    filtered = random and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    penalized = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0
    needs = {
        Feature.RANDOM: random,
        Feature.FILTERED: filtered,
        Feature.PENALIZED: penalized or params.frequency_penalty != 0.0,
        Feature.BIASED: bool(params.logit_bias),
        Feature.MIN_TOKENS: params.min_tokens > 0,
        Feature.LOGPROBS: params.logprobs is not None,
    }
    return Feature(sum(feature for feature, needed in needs.items() if needed))
