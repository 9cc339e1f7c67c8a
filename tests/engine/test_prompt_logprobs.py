"""Log probabilities of prompts and outputs do not depend on chunks, cache or preemption."""

from __future__ import annotations

import pytest
import torch

from pykv.sampling import SamplingParams

PROMPT = [(31 * index) % 250 for index in range(70)]


def expected_entries(toy_logits, tokens):
    logprobs = toy_logits(tokens).log_softmax(-1)
    return [logprobs[index, token].item() for index, token in enumerate(tokens[1:])]


@pytest.mark.parametrize(
    "options", [{}, {"max_chunk_tokens": 7}, {"block_size": 1}, {"num_blocks": 10}], ids=str
)
def test_prompt_logprobs_are_those_of_the_whole_prompt(make_toy_engine, toy_logits, options):
    engine = make_toy_engine(**options)
    plain = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, prompt_logprobs=2, logprobs=0)
    for _ in range(2):  # the second time its blocks are cached, and still everything is computed
        _, output, _ = engine.generate([PROMPT, PROMPT, PROMPT[:30]], [plain, params, plain])
        first, *entries = output.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in entries] == PROMPT[1:]
        assert [entry.logprob for entry in entries] == pytest.approx(
            expected_entries(toy_logits, PROMPT), abs=1e-5
        )
        assert all(len(entry.top_token_ids) == 2 for entry in entries)
        assert output.usage.cached_tokens == 0
        whole = PROMPT + output.outputs[0].token_ids
        sampled = [entry.logprob for entry in output.outputs[0].logprobs]
        assert sampled == pytest.approx(expected_entries(toy_logits, whole)[len(PROMPT) - 1 :], abs=1e-5)


def test_they_come_once_on_the_first_delta(make_toy_engine):
    engine = make_toy_engine(max_chunk_tokens=16)
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True, n=2, prompt_logprobs=0))
    deltas = []
    while engine.has_requests:
        deltas += engine.step()
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert len(deltas[0].prompt_logprobs) == len(PROMPT)
    assert [delta.prompt_token_ids for delta in deltas] == [tuple(PROMPT)] + [None] * (len(deltas) - 1)


def test_a_prompt_of_one_token_has_one_empty_entry(make_toy_engine):
    output = make_toy_engine().generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert output.prompt_logprobs == [None]


def test_the_rank_says_how_many_are_likelier(make_toy_engine, toy_logits):
    output = make_toy_engine().generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    logits = toy_logits(PROMPT)
    for index, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.rank == 1 + int(torch.sum(logits[index] > logits[index, PROMPT[index + 1]]))
