"""Greedy tokens equal those of transformers' `generate`, in float32, whatever the schedule.

A matrix product's rows change in the last bits with the number of rows, so equality is asserted where it can hold: the
two best logits are further apart than GAP at every step. The small model runs in every schedule; the bundled one, whose
reference alone takes half a minute, in some of them, and in all of them in the long form.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.engine.runner import ModelRunner
from pykv.kv_pool import KvPool
from pykv.models import CausalModel, load_model
from pykv.models.sources import find_checkpoint
from pykv.sampling import SamplingParams

NUM_PROMPTS = 16
LONGEST = 2000
NUM_NEW_TOKENS = 48
GAP = 2e-4
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
WORDS = """
the a one some every old new small large quiet river mountain house garden letter answer question child teacher
baker sailor morning evening winter summer road bridge city village window table water bread stone paper light
walked carried opened found lost wrote read asked told waited slept began ended and but because while under over
between after before with without slowly quickly often never again today
"""
LENGTHS = [round(LONGEST ** (index / (NUM_PROMPTS - 1))) for index in range(NUM_PROMPTS)]

SCHEDULES = {
    "all at once": {},
    "chunks of 7": {"max_chunk_tokens": 7},
    "chunks of 16": {"max_chunk_tokens": 16},
    "chunks of 64": {"max_chunk_tokens": 64},
    "blocks of 1": {"block_size": 1, "num_blocks": 6400},
    "blocks of 48": {"block_size": 48, "num_blocks": 140},
}
SMALL_POOL = {"num_blocks": 140, "admission": "watermark", "watermark": 0.0}


@dataclass
class Case:
    """A model, its prompts and what `generate` says after them."""

    model: CausalModel
    prompts: list[list[int]]
    expected: list[list[int]]

    def engine(self, *, block_size=16, num_blocks=400, **options):
        """An engine with a pool of its own."""
        pool = KvPool(self.model.layout, num_blocks, block_size, self.model.dtype)
        return Engine.from_runner(ModelRunner(self.model, pool, "auto"), None, EngineConfig(**options))


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def generated(module, prompt):
    """The tokens of `generate`, after asserting that each was clearly the best."""
    token_ids = torch.tensor([prompt])
    result = module.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),  # else it is guessed from where the padding token stands
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    check_gaps(torch.cat(result.logits))
    return result.sequences[0, len(prompt) :].tolist()


def without_end(module):
    """A model whose EOS is a token like others; `min_new_tokens` would forbid it instead."""
    module.generation_config.eos_token_id = None
    return module.eval()


@torch.inference_mode()
def forced(module, prompt, tokens):
    """What the model, without a cache, calls the best at each place where it is given these tokens.

    Where that is the tokens themselves, they are the greedy continuation, one place after the other.
    """
    sequence = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = module(sequence, logits_to_keep=NUM_NEW_TOKENS, use_cache=False).logits[0]
    check_gaps(logits)
    return logits.argmax(-1).tolist()


def check_gaps(logits):
    best = logits.float().topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > GAP


def own_prompts(vocab_size):
    """Random tokens; some prompts begin with half of a longer one."""
    source = random.Random(17)
    trunk = [source.randrange(vocab_size) for _ in range(LONGEST)]
    prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
    return [
        trunk[: length // 2] + prompt[length // 2 :] for length, prompt in zip(LENGTHS, prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def small():
    """Two layers with grouped queries and random weights."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=900,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        attn_implementation="eager",
    )
    module = without_end(LlamaForCausalLM(config))
    prompts = own_prompts(config.vocab_size)
    expected = [generated(module, prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 100
    model, _ = load_model((module, None))
    return Case(model, prompts, expected)


def test_the_prompts_are_what_they_should_be(small):
    assert (min(LENGTHS), max(LENGTHS), len(LENGTHS)) == (1, LONGEST, NUM_PROMPTS)
    assert sum(LENGTHS) == pytest.approx(5000, rel=0.01)
    assert [len(prompt) for prompt in small.prompts] == LENGTHS
    assert all(len(tokens) == NUM_NEW_TOKENS for tokens in small.expected)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_small_model_in_every_schedule(small, schedule):
    engine = small.engine(**schedule)
    assert tokens_of(engine.generate(small.prompts, PARAMS)) == small.expected
    engine.steps.check()


def test_small_model_alone(small):
    engine = small.engine()
    assert [tokens_of(engine.generate([prompt], PARAMS))[0] for prompt in small.prompts] == small.expected


def check_preempted(case, expected):
    """The longest starts first; beside it the short ones fit until they grow."""
    order = [NUM_PROMPTS - 1, *range(NUM_PROMPTS - 1)]
    engine = case.engine(**SMALL_POOL)
    outputs = engine.generate([case.prompts[index] for index in order], PARAMS)
    assert tokens_of(outputs) == [expected[index] for index in order]
    assert engine.stats().preemptions > 0
    engine.steps.check()


def test_small_model_preempted(small):
    check_preempted(small, small.expected)


def test_small_model_with_a_warm_cache(small):
    engine = small.engine(num_blocks=800)
    engine.generate(small.prompts, PARAMS)
    outputs = engine.generate(small.prompts, PARAMS)
    assert tokens_of(outputs) == small.expected
    for output in outputs:
        assert output.usage.cached_tokens >= (output.usage.prompt_tokens - 1) // 16 * 16


@pytest.fixture(scope="module")
def bundled():
    """The bundled model in float32; two texts, of which its prompts are beginnings."""
    checkpoint = find_checkpoint("bundled", print)
    reference = without_end(AutoModelForCausalLM.from_pretrained(checkpoint.location, dtype=torch.float32))
    model, tokenizer = load_model("bundled", dtype="float32", device="cpu")
    words, texts = WORDS.split(), []
    for seed in (3, 4):
        source = random.Random(seed)
        texts.append(tokenizer(" ".join(source.choice(words) for _ in range(LONGEST)))["input_ids"])
    prompts = [texts[index % 2][:length] for index, length in enumerate(LENGTHS)]
    return reference, Case(model, prompts, [])


@pytest.fixture(scope="module")
def bundled_engine(bundled):
    return bundled[1].engine()


@pytest.fixture(scope="module")
def bundled_tokens(bundled, bundled_engine):
    """All at once, into an empty cache."""
    return tokens_of(bundled_engine.generate(bundled[1].prompts, PARAMS))


def test_bundled_model_says_what_transformers_calls_the_best(bundled, bundled_tokens):
    reference, case = bundled
    assert [len(prompt) for prompt in case.prompts] == LENGTHS
    for prompt, tokens in zip(case.prompts, bundled_tokens, strict=True):
        assert forced(reference, prompt, tokens) == tokens


@pytest.mark.parametrize("index", [0, 7])
def test_bundled_model_says_what_generate_says(bundled, bundled_tokens, index):
    reference, case = bundled
    assert generated(reference, case.prompts[index]) == bundled_tokens[index]


@pytest.mark.parametrize("index", [0, 7, 15])
def test_bundled_model_alone_with_a_warm_cache(bundled, bundled_engine, bundled_tokens, index):
    prompt = bundled[1].prompts[index]
    output = bundled_engine.generate([prompt], PARAMS)[0]
    assert output.outputs[0].token_ids == bundled_tokens[index]
    assert output.usage.cached_tokens >= (len(prompt) - 1) // 16 * 16


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bundled_model_preempted(bundled, bundled_tokens):
    check_preempted(bundled[1], bundled_tokens)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bundled_model_equals_generate_for_every_prompt(bundled, bundled_tokens):
    reference, case = bundled
    assert [generated(reference, prompt) for prompt in case.prompts] == bundled_tokens


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_bundled_model_in_every_schedule(bundled, bundled_tokens, schedule):
    _, case = bundled
    engine = case.engine(enable_prefix_caching=False, **schedule)
    assert tokens_of(engine.generate(case.prompts, PARAMS)) == bundled_tokens


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bundled_model_alone(bundled, bundled_tokens):
    _, case = bundled
    engine = case.engine(enable_prefix_caching=False)
    assert [tokens_of(engine.generate([prompt], PARAMS))[0] for prompt in case.prompts] == bundled_tokens
