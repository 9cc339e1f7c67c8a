"""Runs a text through a model once for each format of its KV cache, and compares what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykv.engine.cache_format import chosen_format
from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.engine.runner import ModelRunner
from pykv.kv_pool import KvPool
from pykv.models import CausalModel
from pykv.sampling.params import SamplingParams

__all__ = ["CacheQuality", "Evaluation", "evaluate"]

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
CONTINUED_TOKENS = 64
PASSAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is run.

    Attributes:
        token_ids: of the text.
        context: the text is cut into pieces of this many tokens, each of which begins anew.
    """

    token_ids: Sequence[int]
    context: int

    def pieces(self) -> list[list[int]]:
        """The pieces; what is left at the end is too short to be one."""
        starts = range(0, len(self.token_ids) - self.context + 1, self.context)
        return [list(self.token_ids[start : start + self.context]) for start in starts]

    def passages(self) -> list[list[int]]:
        """The beginnings of the pieces, which are continued greedily."""
        return [piece[:PASSAGE_TOKENS] for piece in self.pieces()]


@dataclass(frozen=True, slots=True)
class CacheQuality:
    """How a model does with one format.

    Attributes:
        kv_dtype: the format's name.
        bytes_per_token: of the cache.
        num_tokens: of the text that were predicted.
        perplexity: the exponential of the mean negative log probability of these.
        perplexity_change: the relative difference from the reference's: 0.001 is 0.1 %.
        same_best: the share of places in the text where the likeliest token is the reference's.
        same_greedy: the mean share of a greedy continuation until it first leaves the reference's.
    """

    kv_dtype: str
    bytes_per_token: int
    num_tokens: int
    perplexity: float
    perplexity_change: float
    same_best: float
    same_greedy: float


@dataclass(frozen=True, slots=True)
class _Answers:
    """What a model says with one format: log probabilities and best tokens of the text, greedy continuations."""

    bytes_per_token: int
    logprobs: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]
    continued: list[list[int]]


def evaluate(
    model: CausalModel,
    evaluation: Evaluation,
    kv_dtypes: Sequence[str],
    *,
    attention_backend: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[CacheQuality]:
    """Yields each format's quality, the first being the reference of all.

    Args:
        model: that passed the gate.
        kv_dtypes: names of formats.
        tell: told in words what is being run.

    Raises:
        ConfigError: a format is unknown, or cannot be served for this model.
    """
    configs = [
        EngineConfig(kv_dtype=name, attention_backend=attention_backend, max_num_batched_tokens=CHUNK_TOKENS)
        for name in kv_dtypes
    ]
    formats = [chosen_format(model, config) for config in configs]
    reference: _Answers | None = None
    for name, config, form in zip(kv_dtypes, configs, formats, strict=True):
        tell(f"running {len(evaluation.pieces())} pieces of {evaluation.context} tokens with {name}")
        num_blocks = 4 + (evaluation.context + CONTINUED_TOKENS) // BLOCK_SIZE
        pool = KvPool(model.layout, num_blocks, BLOCK_SIZE, form, model.device)
        answers = _answers(ModelRunner(model, pool, attention_backend), evaluation, config)
        reference = reference or answers
        yield _compared(name, answers, reference)


def _answers(runner: ModelRunner, evaluation: Evaluation, config: EngineConfig) -> _Answers:
    scored = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    greedy = SamplingParams(max_tokens=CONTINUED_TOKENS, temperature=0.0, ignore_eos=True)
    logprobs: list[float] = []
    best: list[int] = []
    continued: list[list[int]] = []
    with Engine.from_runner(runner, None, config) as engine:
        for piece, passage in zip(evaluation.pieces(), evaluation.passages(), strict=True):
            (output,) = engine.generate([piece], scored)
            entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
            logprobs += [entry.logprob for entry in entries]
            best += [entry.top_token_ids[0] for entry in entries]
            (output,) = engine.generate([passage], greedy)
            continued.append(output.outputs[0].token_ids)
    return _Answers(runner.kv_bytes_per_token, np.array(logprobs), np.array(best), continued)


def _compared(name: str, answers: _Answers, reference: _Answers) -> CacheQuality:
    perplexity, expected = (math.exp(-each.logprobs.mean()) for each in (answers, reference))
    pairs = zip(answers.continued, reference.continued, strict=True)
    return CacheQuality(
        kv_dtype=name,
        bytes_per_token=answers.bytes_per_token,
        num_tokens=len(answers.logprobs),
        perplexity=perplexity,
        perplexity_change=perplexity / expected - 1,
        same_best=float((answers.best == reference.best).mean()),
        same_greedy=float(np.mean([_same_beginning(*pair) for pair in pairs])),
    )


def _same_beginning(tokens: list[int], expected: list[int]) -> float:
    """The share of the tokens before the first that differs."""
    differing = (
        index for index, (one, other) in enumerate(zip(tokens, expected, strict=True)) if one != other
    )
    return next(differing, len(expected)) / len(expected)
