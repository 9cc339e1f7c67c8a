"""A toy model in exact integer arithmetic gives the same tokens, bit for bit, however it is scheduled."""

from __future__ import annotations

import random

import pytest

from pykv.sampling import SamplingParams

NUM_NEW_TOKENS = 16
LENGTHS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 80, 150]
RANDOM = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=1.5, seed=11, ignore_eos=True, top_p=0.95)
GREEDY = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    """Some begin alike, so that they share blocks."""
    source = random.Random(4)
    trunk = [source.randrange(256) for _ in range(max(LENGTHS))]
    own = [[source.randrange(256) for _ in range(length)] for length in LENGTHS]
    return [trunk[: length // 2] + tokens[length // 2 :] for length, tokens in zip(LENGTHS, own, strict=True)]


@pytest.fixture(scope="module")
def greedy_tokens(prompts, toy_reference):
    """By the model alone, without cache and engine."""
    return [toy_reference_tokens(toy_reference, prompt) for prompt in prompts]


def toy_reference_tokens(toy_reference, prompt):
    tokens = []
    while len(tokens) < NUM_NEW_TOKENS:
        tokens += toy_reference([*prompt, *tokens], NUM_NEW_TOKENS - len(tokens))
    return tokens


@pytest.fixture(scope="module")
def random_tokens(make_toy_engine, prompts):
    """By the engine, each prompt alone and without prefix cache."""
    engine = make_toy_engine(enable_prefix_caching=False)
    return [tokens_of(engine.generate([prompt], RANDOM))[0] for prompt in prompts]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


SWAPPED = {
    "num_blocks": 13,
    "watermark": 0.0,
    "admission": "watermark",
    "num_host_blocks": 64,
    "swap_space_bytes": 1,
    "preemption": "swap",
}
SCHEDULES = {
    "all at once": {},
    "without prefix cache": {"enable_prefix_caching": False},
    "chunks of 7": {"max_chunk_tokens": 7},
    "chunks of 16": {"max_chunk_tokens": 16},
    "chunks of 64": {"max_chunk_tokens": 64},
    "steps of 9 tokens": {"max_num_batched_tokens": 9},
    "three rows": {"max_num_seqs": 3},
    "blocks of 1": {"block_size": 1, "num_blocks": 2048},
    "blocks of 48": {"block_size": 48},
    "blocks of 48, parts of them copied": {"block_size": 48, "partial_block_reuse": 3},
    "pool of 13 blocks, forecast": {"num_blocks": 13},
    "pool of 13 blocks": {"num_blocks": 13, "watermark": 0.0, "admission": "watermark"},
    "pool of 13 blocks, chunks of 7": {
        "num_blocks": 13,
        "watermark": 0.0,
        "admission": "watermark",
        "max_chunk_tokens": 7,
    },
    "pool of 13 blocks, swapped": SWAPPED,
    "pool of 13 blocks, swapped, chunks of 7": SWAPPED | {"max_chunk_tokens": 7},
    "pool of 13 blocks, a swap space of 3": SWAPPED | {"num_host_blocks": 4},
    "pool of 13 blocks, whatever costs less": SWAPPED | {"preemption": "auto"},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_schedule_does_not_change_a_token(
    make_toy_engine, prompts, greedy_tokens, random_tokens, schedule
):
    engine = make_toy_engine(**schedule)
    assert tokens_of(engine.generate(prompts, GREEDY)) == greedy_tokens
    assert tokens_of(engine.generate(prompts, RANDOM)) == random_tokens
    assert tokens_of(engine.generate(prompts[::-1], GREEDY))[::-1] == greedy_tokens
    engine.steps.check()
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.preemptions > 0 or schedule.get("admission") != "watermark"
    assert stats.swapped_in_blocks > 0 or schedule.get("preemption") != "swap"
    assert stats.host_blocks_free == stats.host_blocks_total


def test_each_alone_gives_the_tokens_of_the_model(make_toy_engine, prompts, greedy_tokens):
    engine = make_toy_engine()
    assert [tokens_of(engine.generate([prompt], GREEDY))[0] for prompt in prompts] == greedy_tokens


def test_a_warm_prefix_cache_changes_nothing_but_the_work(make_toy_engine, prompts, greedy_tokens):
    engine = make_toy_engine()
    engine.generate(prompts, GREEDY)
    outputs = engine.generate(prompts, GREEDY)
    assert tokens_of(outputs) == greedy_tokens
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.usage.cached_tokens >= (len(prompt) - 1) // 16 * 16
        assert output.usage.cached_tokens < len(prompt)


def test_a_prefill_that_starts_inside_a_block_changes_nothing_but_the_work(
    make_toy_engine, prompts, greedy_tokens
):
    engine = make_toy_engine(partial_block_reuse=2)
    engine.generate(prompts, GREEDY)
    for prompt, tokens in zip(prompts, greedy_tokens, strict=True):
        (output,) = engine.generate([prompt], GREEDY)
        assert output.outputs[0].token_ids == tokens
        num_known = len(prompt) - 1
        assert output.usage.cached_tokens == num_known - (num_known % 16 == 1)
    engine.steps.check()


def test_an_answer_that_becomes_a_prompt_hits_its_own_blocks(make_toy_engine, prompts, greedy_tokens):
    engine = make_toy_engine()
    engine.generate(prompts, GREEDY)
    half = NUM_NEW_TOKENS // 2
    longer = [[*prompt, *tokens[:half]] for prompt, tokens in zip(prompts, greedy_tokens, strict=True)]
    outputs = engine.generate(longer, SamplingParams(max_tokens=half, temperature=0, ignore_eos=True))
    assert tokens_of(outputs) == [tokens[half:] for tokens in greedy_tokens]


FORKED = [
    SamplingParams(seed=index, max_tokens=10, temperature=2.0, ignore_eos=True, n=4)
    for index in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def forked_tokens(make_toy_engine, prompts):
    """By the engine, each prompt alone and without prefix cache."""
    engine = make_toy_engine(enable_prefix_caching=False)
    return [
        samples_of(engine.generate([prompt], params)[0])
        for prompt, params in zip(prompts, FORKED, strict=True)
    ]


def samples_of(output):
    return [sample.token_ids for sample in output.outputs]


@pytest.mark.parametrize(
    "schedule",
    [
        {"num_blocks": 1024},
        {"max_chunk_tokens": 7},
        {"block_size": 1, "num_blocks": 4096},
        {"num_blocks": 24},
    ],
    ids=str,
)
def test_forks_sample_what_they_sample_alone(make_toy_engine, prompts, forked_tokens, schedule):
    engine = make_toy_engine(**{"watermark": 0.0, "admission": "watermark", **schedule})
    outputs = engine.generate(prompts, FORKED)
    assert [samples_of(output) for output in outputs] == forked_tokens
    assert all(len({tuple(tokens) for tokens in samples}) == 4 for samples in forked_tokens)
    engine.steps.check()


def test_penalties_do_not_depend_on_preemption(make_toy_engine, prompts):
    params = SamplingParams(
        max_tokens=NUM_NEW_TOKENS,
        temperature=0,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
    )
    expected = tokens_of(make_toy_engine().generate(prompts, params))
    small = make_toy_engine(num_blocks=13, watermark=0.0, admission="watermark")
    assert tokens_of(small.generate(prompts, params)) == expected
    assert small.stats().preemptions > 0
