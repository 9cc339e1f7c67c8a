"""The synchronous engine: what it takes, what it refuses, what it gives back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    StepError,
)
from pykv.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)


def text_of(output):
    return output.outputs[0].text


def drain(engine):
    deltas = []
    while engine.has_requests:
        deltas += engine.step()
    return deltas


def test_a_text_comes_back_with_its_reason_and_usage(make_scripted_engine):
    engine = make_scripted_engine("삼겹살 \U0001f642!")
    output = engine.generate("say it\n", GREEDY)[0]
    completion = output.outputs[0]
    assert completion.text == "삼겹살 \U0001f642!"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert bytes(completion.token_ids[:-1]).decode() == completion.text
    assert output.prompt_token_ids == list(b"say it\n")
    assert output.usage.prompt_tokens == 7
    assert output.usage.output_tokens == len(completion.token_ids)


def test_a_request_that_is_paused_by_its_id_goes_on_with_the_same_text(make_scripted_engine):
    engine = make_scripted_engine("abcdef")
    request_id = engine.add_request("\n", GREEDY)
    deltas = engine.step() + engine.step()
    assert engine.pause(request_id)
    assert not engine.pause(request_id)
    assert [engine.step(), engine.step()] == [[], []]
    assert engine.stats().num_paused == 1
    assert engine.resume(request_id)
    assert not engine.resume(request_id)
    assert "".join(delta.text for delta in deltas + drain(engine)) == "abcdef"
    assert not engine.pause(request_id)


def test_prompts_of_many_kinds_come_back_in_order(make_scripted_engine):
    engine = make_scripted_engine(lambda history: history[0] if len(history) < 8 else 258)
    prompts = ["a\n", [98, 10], np.array([99, 10], np.int32), (100, 10)]
    assert [text_of(output)[0] for output in engine.generate(prompts, GREEDY)] == ["a", "b", "c", "d"]


def test_each_prompt_may_have_its_own_parameters(make_scripted_engine):
    engine = make_scripted_engine("abcdef")
    outputs = engine.generate(["\n", "\n"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [text_of(output) for output in outputs] == ["ab", "abc"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


@pytest.mark.parametrize("num_prompt_tokens", [10, 62, 63])
def test_without_a_limit_a_sequence_ends_at_the_context_cap(make_scripted_engine, num_prompt_tokens):
    engine = make_scripted_engine(lambda history: 65, max_model_len=64)
    output = engine.generate([[65] * num_prompt_tokens], GREEDY)[0]
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 64 - num_prompt_tokens
    assert engine.stats().blocks_active == 0


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 10_000])
def test_a_prompt_without_room_for_one_more_token_is_refused(make_scripted_engine, num_prompt_tokens):
    engine = make_scripted_engine(lambda history: 65, max_model_len=64)
    with pytest.raises(CapacityError, match=r"64|63"):
        engine.generate([[65] * num_prompt_tokens], GREEDY)


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 10_000])
def test_the_longest_prompt_that_a_refusal_names_is_taken(make_scripted_engine, num_prompt_tokens):
    engine = make_scripted_engine(lambda history: 65, max_model_len=64)
    for prompt in ([65] * num_prompt_tokens, "A" * num_prompt_tokens * 13):
        with pytest.raises(
            CapacityError, match=r"prompt has .*: allowed is at most 63, as prompt and output"
        ):
            engine.generate([prompt], GREEDY)
    assert len(engine.generate([[65] * 63], GREEDY)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize("max_tokens", [54, 55, 1000])
def test_max_tokens_beyond_the_cap_ends_with_length(make_scripted_engine, max_tokens):
    engine = make_scripted_engine(lambda history: 65, max_model_len=64)
    output = engine.generate([[65] * 10], SamplingParams(max_tokens=max_tokens, temperature=0))[0]
    assert len(output.outputs[0].token_ids) == 54


def test_the_pool_caps_the_context_too(make_scripted_engine):
    engine = make_scripted_engine(lambda history: 65, num_blocks=4, block_size=4)
    assert engine.max_model_len == 12
    assert len(engine.generate([[65] * 5], GREEDY)[0].outputs[0].token_ids) == 7


BAD_PROMPTS = ["", [], [-1], [259], [2**40], [2**70], [1.5], [True], ["a"], [[1], [2, 3]], None, 5, b"ab"]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
def test_a_bad_prompt_is_refused_and_the_others_go_on(make_scripted_engine, prompt):
    engine = make_scripted_engine("abc")
    running = engine.add_request("\n", GREEDY)
    first = engine.step()
    with pytest.raises(InvalidRequestError, match="prompt") as caught:
        engine.add_request(prompt, GREEDY)
    assert caught.value.field == "prompt"
    deltas = first + drain(engine)
    assert {delta.request_id for delta in deltas} == {running}
    assert "".join(delta.text for delta in deltas) == "abc"


@pytest.mark.parametrize(
    "options",
    [{"stop_token_ids": [264]}, {"logit_bias": {264: 1}}, {"n": 5}],
    ids=lambda options: next(iter(options)),
)
def test_parameters_that_the_model_cannot_have_are_refused(make_scripted_engine, options):
    engine = make_scripted_engine("abc", max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        engine.generate("\n", SamplingParams(**options))
    assert not engine.has_requests


def test_a_long_text_is_refused_before_it_is_encoded(make_scripted_engine, monkeypatch):
    engine = make_scripted_engine("abc")
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    with pytest.raises(CapacityError, match="at least"):
        engine.generate("a" * 5_000_000)
    with pytest.raises(CapacityError, match="at least"):
        engine.chat([{"role": "user", "content": "a" * 5_000_000}])


def test_an_engine_without_tokenizer_takes_ids_only(make_toy_engine, make_scripted_engine):
    engine = Engine.from_runner(make_scripted_engine("abc").runner)
    assert engine.generate([[10]], GREEDY)[0].outputs[0].token_ids == [*b"abc", 258]
    for prompt, params in (("a", GREEDY), ([10], SamplingParams(stop="a"))):
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            engine.generate([prompt], params)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        engine.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("prompts", [[1, 2], np.array([1, 2])])
def test_bare_ids_are_no_list_of_prompts(make_scripted_engine, prompts):
    with pytest.raises(InvalidRequestError, match="prompts"):
        make_scripted_engine("abc").generate(prompts)


def test_a_stop_string_over_several_tokens_leaves_nothing_of_itself(make_scripted_engine):
    engine = make_scripted_engine("ABC DEFGHIJ more")
    engine.add_request("\n", SamplingParams(temperature=0, stop="DEFGHIJ"))
    deltas = drain(engine)
    assert "".join(delta.text for delta in deltas) == "ABC "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert sum(len(delta.token_ids) for delta in deltas) == len("ABC DEFGHIJ")


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "stop"), (7, "length")])
def test_held_back_text_comes_at_the_end(make_scripted_engine, max_tokens, reason):
    engine = make_scripted_engine("abc</s")
    output = engine.generate("\n", SamplingParams(temperature=0, stop="</s>x", max_tokens=max_tokens))[0]
    assert text_of(output) == "abc</s"
    assert output.outputs[0].finish_reason == "stop"
    cut = engine.generate("\n", SamplingParams(temperature=0, stop="</s>x", max_tokens=5))[0]
    assert (text_of(cut), cut.outputs[0].finish_reason) == ("abc</", "length")


def test_held_back_text_comes_when_a_request_is_aborted(make_scripted_engine):
    engine = make_scripted_engine("ab</s>y")
    name = engine.add_request("\n", SamplingParams(temperature=0, stop="</s>x"))
    deltas = [delta for _ in range(5) for delta in engine.step()]
    assert engine.abort(name)
    deltas += drain(engine)
    assert "".join(delta.text for delta in deltas) == "ab</s"
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].usage.output_tokens == 5


def test_a_stop_token_ends_the_text_before_itself(make_scripted_engine):
    engine = make_scripted_engine("abXc")
    output = engine.generate("\n", SamplingParams(temperature=0, stop_token_ids=[ord("X")]))[0].outputs[0]
    assert (output.text, output.stop_reason, output.finish_reason) == ("ab", ord("X"), "stop")
    assert output.token_ids == list(b"abX")


def test_ignore_eos_goes_on_until_another_end(make_scripted_engine):
    engine = make_scripted_engine("ab")
    output = engine.generate("\n", SamplingParams(temperature=0, ignore_eos=True, max_tokens=5))[0].outputs[0]
    assert output.token_ids == [*b"ab", 258, 258, 258]
    assert (output.text, output.finish_reason) == ("ab", "length")


def test_min_tokens_keeps_eos_and_stop_strings_away(make_scripted_engine):
    def rule(history):
        logits = torch.zeros(259)
        logits[258], logits[ord("x")] = 9.0, 5.0
        return logits

    engine = make_scripted_engine(rule)
    output = engine.generate("\n", SamplingParams(temperature=0, min_tokens=3))[0].outputs[0]
    assert output.token_ids == [*b"xxx", 258]
    params = SamplingParams(temperature=0, min_tokens=3, stop="x", logit_bias={258: -100})
    stopped = engine.generate("\n", params)[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("xxx", "x")


def test_samples_of_a_request_differ_end_by_themselves_and_share_the_prompt(make_toy_engine):
    engine = make_toy_engine()
    params = SamplingParams(n=4, seed=7, temperature=2.0, max_tokens=40, logit_bias={258: 5.0})
    prompt = list(range(64))
    output = engine.generate([prompt], params)[0]
    texts = [sample.token_ids for sample in output.outputs]
    assert len({tuple(tokens) for tokens in texts}) == 4
    assert len({len(tokens) for tokens in texts}) > 1
    assert output.usage.prompt_tokens == 64
    assert output.usage.output_tokens == sum(map(len, texts))
    again = engine.generate([prompt], params)[0]
    assert [sample.token_ids for sample in again.outputs] == texts
    assert engine.stats().blocks_active == 0


def test_usage_is_on_the_last_delta_alone(make_toy_engine):
    engine = make_toy_engine()
    engine.add_request([1, 2], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    deltas = drain(engine)
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].usage.output_tokens == 15


def test_a_live_id_is_refused_and_a_dead_one_is_free(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.add_request("\n", GREEDY, request_id="x")
    with pytest.raises(DuplicateRequestError, match="x"):
        engine.add_request("\n", GREEDY, request_id="x")
    drain(engine)
    engine.add_request("\n", GREEDY, request_id="x")
    assert engine.abort("x")
    assert not engine.abort("y")
    drain(engine)
    assert not engine.abort("x")


def test_generate_gives_the_queue_no_more_than_it_takes(make_scripted_engine):
    engine = make_scripted_engine("abc", max_queued_requests=3, max_num_seqs=2)
    outputs = engine.generate(["\n"] * 20, GREEDY)
    assert [text_of(output) for output in outputs] == ["abc"] * 20


def test_a_full_queue_refuses_and_counts_each_sample(make_scripted_engine):
    engine = make_scripted_engine("abc", max_queued_requests=3)
    engine.add_request("\n", SamplingParams(n=3))
    with pytest.raises(QueueFullError):
        engine.add_request("\n", GREEDY)
    drain(engine)
    engine.add_request("\n", GREEDY)


def test_scopes_share_no_blocks(make_toy_engine):
    engine = make_toy_engine()
    prompt, cached = list(range(100)), []
    for scope in (b"a", b"b", b"", b"a", b"b"):
        engine.add_request(prompt, GREEDY, scope=scope)
        cached.append(drain(engine)[-1].usage.cached_tokens > 0)
    assert cached == [False, False, False, True, True]


def test_generate_refuses_to_mix_with_added_requests(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.add_request("\n", GREEDY)
    with pytest.raises(StepError, match="add_request"):
        engine.generate("\n")


def test_a_closed_engine_refuses(make_scripted_engine):
    with make_scripted_engine("abc") as engine:
        engine.add_request("\n", GREEDY)
    assert engine.stats().blocks_active == 0
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("\n")


def test_an_interrupted_generate_leaves_no_request_behind(make_scripted_engine):
    engine = make_scripted_engine("abc")
    engine.runner.broken = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["\n", "a\n"], GREEDY)
    engine.runner.broken = None
    assert engine.stats().blocks_active == 0
    assert text_of(engine.generate("\n", GREEDY)[0]) == "abc"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("num_blocks", 1),
        ("kv_memory_bytes", -1),
        ("max_model_len", 1.5),
        ("max_num_seqs", True),
        ("dtype", "int8"),
        ("device", ""),
        ("attention_backend", "cuda"),
        ("watermark", 1.0),
        ("eviction", "fifo"),
        ("enable_prefix_caching", "yes"),
        ("num_block", 5),
    ],
)
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ConfigError, match=option):
        EngineConfig.from_mapping({option: value})


def test_an_attention_backend_that_the_machine_cannot_run_is_refused():
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter serves the CPU")
    config = EngineConfig(device="cpu", attention_backend="triton", num_blocks=8)
    with pytest.raises(
        ConfigError, match=r"attention_backend is 'triton', but .*: allowed for 'cpu' is 'torch', 'cpu'"
    ):
        Engine("bundled", config=config)


def test_a_pool_has_one_size():
    with pytest.raises(ConfigError, match="num_blocks and kv_memory_bytes"):
        EngineConfig(num_blocks=10, kv_memory_bytes=10)


@pytest.mark.parametrize(("eviction", "num_cached"), [("lru", 0), ("segmented_lru", 8)])
def test_what_was_hit_outlives_a_scan_by_the_policy_that_was_chosen(make_toy_engine, eviction, num_cached):
    engine = make_toy_engine(num_blocks=13, block_size=4, eviction=eviction)
    params = SamplingParams(max_tokens=1)
    kept = list(range(1, 10))
    for prompt in (kept, kept, *([*range(start, start + 16)] for start in range(20, 220, 20))):
        engine.generate([prompt], params)
    (output,) = engine.generate([kept], params)
    assert output.usage.cached_tokens == num_cached
