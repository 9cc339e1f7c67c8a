"""Every format of the KV cache through the engine: a prompt's tokens do not depend on its company, in any of them.

A format of few bits turns a number that lies near the middle of two steps into another one when its last bits change,
as they do with the number of rows of a matrix product. One such change moves the logits by less than `GAP`, so the
tokens are asserted where the two best are further apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.engine.loading import load_runner
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams

NUM_NEW_TOKENS = 12
GAP = 2e-3
LENGTHS = [1, 5, 16, 17, 31, 48, 90, 150]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=2)

# What of a token a layer of 2 heads of 16 numbers keeps, keys and values, in two layers.
NUM_ROWS, HEAD_DIM = 2 * 2 * 2, 16


@dataclass(frozen=True)
class Stored:
    """A format, as the options name it, and the bytes of a token."""

    options: dict[str, object]
    bytes_per_token: int
    expected: list[list[int]] = field(default_factory=list)


FORMATS = {
    "f32": Stored({"kv_dtype": "f32"}, NUM_ROWS * HEAD_DIM * 4),
    "bf16": Stored({"kv_dtype": "bf16"}, NUM_ROWS * HEAD_DIM * 2),
    "f16": Stored({"kv_dtype": "f16"}, NUM_ROWS * HEAD_DIM * 2),
    "int8": Stored({"kv_dtype": "int8"}, NUM_ROWS * (HEAD_DIM + 4)),
    "fp8": Stored({"kv_dtype": "fp8"}, NUM_ROWS * (HEAD_DIM + 4)),
    "int8, given scales": Stored({"kv_dtype": "int8", "kv_scales": (0.05, 0.03)}, NUM_ROWS * HEAD_DIM),
    "fp8, given scales": Stored({"kv_dtype": "fp8", "kv_scales": (0.01, 0.02)}, NUM_ROWS * HEAD_DIM),
    "int4": Stored({"kv_dtype": "int4"}, NUM_ROWS * (HEAD_DIM // 2 + 4)),
}

SCHEDULES = {
    "all at once": {},
    "chunks of 7": {"max_chunk_tokens": 7},
    "blocks of 5": {"block_size": 5, "num_blocks": 120},
}
PRESSED = {"num_blocks": 20, "admission": "watermark", "watermark": 0.0}


@pytest.fixture(scope="module")
def module():
    """Two layers with grouped queries and random weights."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts():
    """Random tokens; some begin with half of a longer one."""
    source = random.Random(24)
    trunk = [source.randrange(151) for _ in range(max(LENGTHS))]
    own = [[source.randrange(151) for _ in range(length)] for length in LENGTHS]
    return [trunk[: length // 2] + tokens[length // 2 :] for length, tokens in zip(LENGTHS, own, strict=True)]


@pytest.fixture(scope="module")
def make_engine(module):
    """Makes an engine of the model from its options."""

    def make(**options):
        return Engine(module, config=EngineConfig(**({"num_blocks": 60} | options)))

    return make


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def stored(request, four_bits, make_engine, prompts):
    """A format, with the tokens of each prompt alone, which are clearly the best."""
    if not request.param.expected:
        engine = make_engine(**request.param.options, enable_prefix_caching=False)
        for prompt in prompts:
            sample = engine.generate([prompt], GREEDY)[0].outputs[0]
            assert min(-(step.top_logprobs[1] - step.top_logprobs[0]) for step in sample.logprobs) > GAP
            request.param.expected.append(sample.token_ids)
    return request.param


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_schedule_does_not_change_a_token(make_engine, prompts, stored, schedule):
    engine = make_engine(**stored.options, **schedule)
    assert tokens_of(engine.generate(prompts, GREEDY)) == stored.expected
    assert engine.stats().kv_bytes_per_token == stored.bytes_per_token
    engine.steps.check()


def test_a_hit_reads_what_was_stored(make_engine, prompts, stored):
    engine = make_engine(**stored.options, num_blocks=120)
    engine.generate(prompts, GREEDY)
    outputs = engine.generate(prompts[::-1], GREEDY)
    assert tokens_of(outputs)[::-1] == stored.expected
    assert all(
        output.usage.cached_tokens >= (output.usage.prompt_tokens - 1) // 16 * 16 for output in outputs
    )


def test_a_block_that_is_copied_in_part_holds_what_was_stored(make_engine, prompts, stored):
    engine = make_engine(**stored.options, num_blocks=120, partial_block_reuse=2)
    engine.generate([[*prompt[:-1], (prompt[-1] + 1) % 151] for prompt in prompts], GREEDY)
    outputs = engine.generate(prompts, GREEDY)
    assert tokens_of(outputs) == stored.expected
    # All but the last token, unless it is one alone in its block that would be copied.
    for prompt, output in zip(prompts, outputs, strict=True):
        num_known = len(prompt) - 1
        assert output.usage.cached_tokens == num_known - (num_known % 16 == 1)
    engine.steps.check()


def test_samples_of_one_prompt_copy_what_they_share(make_engine, prompts, stored):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, n=3)
    outputs = make_engine(**stored.options, num_blocks=120).generate(prompts, params)
    for output, expected in zip(outputs, stored.expected, strict=True):
        assert [sample.token_ids for sample in output.outputs] == [expected] * 3


def test_what_was_preempted_goes_on_computed_again(make_engine, prompts, stored):
    engine = make_engine(**stored.options, **PRESSED)
    assert tokens_of(engine.generate(prompts[::-1], GREEDY))[::-1] == stored.expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swapped_out_blocks == 0
    engine.steps.check()


def test_what_was_preempted_goes_on_copied_back(make_engine, prompts, stored):
    engine = make_engine(**stored.options, **PRESSED, preemption="swap", swap_space_bytes=2**20)
    outputs = engine.generate(prompts[::-1], GREEDY)
    assert tokens_of(outputs)[::-1] == stored.expected
    stats = engine.stats()
    assert stats.swapped_out_blocks == sum(output.usage.swapped_blocks for output in outputs) > 0
    assert stats.swapped_in_blocks > 0
    assert stats.recomputed_tokens == 0
    assert stats.host_blocks_free == stats.host_blocks_total == 2**20 // (16 * stored.bytes_per_token) - 1
    assert any(output.usage.stalled_ms > 0 for output in outputs)
    engine.steps.check()


def test_a_full_swap_space_falls_back_to_computing(make_engine, prompts, stored):
    space = 3 * 16 * stored.bytes_per_token
    engine = make_engine(**stored.options, **PRESSED, preemption="swap", swap_space_bytes=space)
    assert tokens_of(engine.generate(prompts[::-1], GREEDY))[::-1] == stored.expected
    assert engine.stats().host_blocks_total == 2
    assert engine.stats().recomputed_tokens > 0


def prompt_logprobs(engine, prompt):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    entries = engine.generate([prompt], params)[0].prompt_logprobs
    return torch.tensor([entry.logprob for entry in entries[1:]])


@pytest.mark.parametrize(
    ("kv_dtype", "least", "most"),
    [("bf16", 1e-5, 0.05), ("f16", 1e-6, 0.01), ("int8", 1e-4, 0.1), ("fp8", 1e-3, 0.5), ("int4", 1e-2, 3.0)],
)
def test_a_format_of_few_bits_is_near_the_exact_one_and_not_it(
    four_bits, make_engine, prompts, kv_dtype, least, most
):
    exact = prompt_logprobs(make_engine(kv_dtype="f32"), prompts[-1])
    found = prompt_logprobs(make_engine(kv_dtype=kv_dtype), prompts[-1])
    assert least < (found - exact).abs().max() < most


def test_auto_is_the_weights_own(make_engine):
    assert make_engine().stats().kv_bytes_per_token == FORMATS["f32"].bytes_per_token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype is 'int3': allowed is one of auto, f32, bf16, f16, int8, fp8"),
        ({"kv_dtype": "bf16", "kv_scales": (1.0, 1.0)}, "'bf16' has none: allowed with int8, fp8"),
        ({"kv_scales": (1.0, 1.0)}, "kv_dtype is 'auto': allowed with int8, fp8"),
        ({"kv_dtype": "int8", "kv_scales": (1.0,)}, "allowed is two finite numbers above 0"),
        (
            {"kv_dtype": "int8", "kv_scales": (0.0, 1.0)},
            r"kv_scales is .*: allowed is a finite number above 0",
        ),
        (
            {"kv_dtype": "fp8", "kv_scales": (1.0, float("nan"))},
            r"kv_scales is .*: allowed is a finite number above 0",
        ),
        ({"preemption": "swap"}, "swap_space_bytes is 0"),
        ({"preemption": "never"}, "preemption is 'never': allowed is one of auto, recompute, swap"),
        ({"swap_space_bytes": -1}, "swap_space_bytes is -1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_dtype": "int4", "attention_backend": "cpu"},
            "attention_backend is 'cpu': allowed with it are auto and torch",
        ),
        ({"swap_space_bytes": 100}, r"swap_space_bytes is 100: allowed is 0, or at least \d+, two blocks"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_model_are_refused(four_bits, module, options, message):
    with pytest.raises(ConfigError, match=message):
        load_runner(module, None, EngineConfig(num_blocks=8, **options), None)
