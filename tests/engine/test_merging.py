"""Merged deltas say what the single ones said."""

from __future__ import annotations

from pykv.engine.merging import merged
from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage


def test_everything_is_kept_in_order():
    scores = (None, TokenLogprobs(5, -1.0, 1))
    usage = Usage(prompt_tokens=2, cached_tokens=0, output_tokens=3, preemptions=0, recomputed_tokens=0)
    first = OutputDelta("x", 1, (1,), "a", (TokenLogprobs(1, -0.5, 1),), scores, prompt_token_ids=(4, 5))
    second = OutputDelta("x", 1, (2, 3), "bc", (TokenLogprobs(2, -0.1, 1), TokenLogprobs(3, -0.2, 2)))
    last = OutputDelta("x", 1, (), "d", finish_reason="stop", stop_reason="stop", usage=usage)
    assert merged([first, second, last]) == OutputDelta(
        "x",
        1,
        (1, 2, 3),
        "abcd",
        first.logprobs + second.logprobs,
        scores,
        "stop",
        "stop",
        usage,
        prompt_token_ids=(4, 5),
    )


def test_without_logprobs_there_are_none():
    assert merged([OutputDelta("x", 0, (1,), "a"), OutputDelta("x", 0, (2,), "b")]).logprobs is None


def test_one_delta_is_itself():
    delta = OutputDelta("x", 0, (1,), "a")
    assert merged([delta]) is delta
