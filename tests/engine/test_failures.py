"""What goes wrong for one request goes wrong for it alone."""

from __future__ import annotations

import pytest
import torch

from pykv.engine.request import Sequence
from pykv.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
POISON = 7


def outcomes(outputs):
    return [(each.outputs[0].text, each.outputs[0].finish_reason) for each in outputs]


@pytest.mark.parametrize("options", [{}, {"max_chunk_tokens": 2}, {"max_num_batched_tokens": 3}])
def test_a_request_that_makes_the_model_raise_fails_alone(make_scripted_engine, options):
    engine = make_scripted_engine("abc", **options)
    engine.runner.raising = {POISON}
    outputs = engine.generate([[65, 10], [65, 65, POISON, 10], [66, 10]], GREEDY)
    assert outcomes(outputs) == [("abc", "stop"), ("", "error"), ("abc", "stop")]
    assert "this token is too much" in outputs[1].outputs[0].error
    assert engine.stats().blocks_active == 0
    engine.steps.check()


def test_a_request_that_fails_while_it_decodes_keeps_what_it_said(make_scripted_engine):
    def rule(history):
        return POISON if history[0] == 66 and len(history) == 5 else 65 if len(history) < 9 else 258

    engine = make_scripted_engine(rule)
    engine.runner.raising = {POISON}
    outputs = engine.generate([[65, 10], [66, 10]], GREEDY)
    assert outcomes(outputs) == [("A" * 7, "stop"), ("AAA\x07", "error")]


def test_a_request_that_shares_blocks_with_one_that_fails_is_computed_again(make_scripted_engine):
    engine = make_scripted_engine("abc", block_size=4, max_chunk_tokens=8)
    engine.runner.raising = {POISON}
    shared = [65] * 8
    outputs = engine.generate([[*shared, POISON, 10], [*shared, 10], [*shared, 66, 10]], GREEDY)
    assert outcomes(outputs) == [("", "error"), ("abc", "stop"), ("abc", "stop")]
    engine.steps.check()


def test_twins_of_a_failing_writer_run(make_scripted_engine):
    """The writer's first chunk fails in the step in which others already rely on its blocks."""
    engine = make_scripted_engine("abc", block_size=4)
    shared = [65] * 8
    engine.runner.raising = {POISON}
    outputs = engine.generate([[*shared, POISON, 10], [*shared, 65, 10], [*shared, 66, 10]], GREEDY)
    assert outcomes(outputs) == [("", "error"), ("abc", "stop"), ("abc", "stop")]
    assert engine.stats().blocks_active == 0
    engine.steps.check()


def test_text_is_not_said_twice_when_a_sample_is_void(make_scripted_engine, monkeypatch):
    taken_back, retract = [], Sequence.retract
    monkeypatch.setattr(Sequence, "retract", lambda self: taken_back.append(self) or retract(self))
    engine = make_scripted_engine("b\U0001f642c", block_size=4)
    engine.runner.raising = {POISON}
    shared = [65] * 8
    params = SamplingParams(temperature=0, stop="never", frequency_penalty=0.1)
    outputs = engine.generate([[*shared, POISON, 10], [*shared, 10]], params)
    assert outcomes(outputs) == [("", "error"), ("b\U0001f642c", "stop")]
    assert len(taken_back) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_finite_logits_fails_alone(make_scripted_engine, bad):
    def rule(history):
        if history[0] == 66 and len(history) == 4:
            return torch.full((259,), bad)
        return 65 if len(history) < 6 else 258

    outputs = make_scripted_engine(rule).generate([[65, 10], [66, 10]], GREEDY)
    assert outcomes(outputs) == [("AAAA", "stop"), ("AA", "error")]
    assert "no finite" in outputs[1].outputs[0].error


def test_all_samples_of_a_request_fail_with_its_prompt(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.runner.raising = {POISON}
    params = SamplingParams(temperature=0, n=3)
    failed, fine = engine.generate([[POISON, 10], [65, 10]], params)
    assert [sample.finish_reason for sample in failed.outputs] == ["error"] * 3
    assert all("too much" in sample.error for sample in failed.outputs)
    assert [sample.text for sample in fine.outputs] == ["abc"] * 3


def test_a_model_that_raises_at_everything_ends_the_engine_loudly(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.runner.broken = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate(["\n", "a\n"], GREEDY)


def test_a_single_request_that_raises_does_not_end_the_engine(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.runner.raising = {POISON}
    for _ in range(5):
        assert outcomes(engine.generate([[POISON, 10]], GREEDY)) == [("", "error")]
    assert outcomes(engine.generate([[65, 10]], GREEDY)) == [("abc", "stop")]


def test_text_that_cannot_be_decoded_fails_its_request_alone(make_scripted_engine, monkeypatch):
    engine = make_scripted_engine("abc")
    make = engine.tokenizer.detokenizer

    class Broken:
        def push(self, token_id):
            raise OverflowError("no such text")

        def flush(self):
            return ""

    monkeypatch.setattr(engine.tokenizer, "detokenizer", lambda ids: Broken() if ids[0] == 66 else make(ids))
    outputs = engine.generate([[65, 10], [66, 10]], GREEDY)
    assert outcomes(outputs) == [("abc", "stop"), ("", "error")]
    assert "no such text" in outputs[1].outputs[0].error
