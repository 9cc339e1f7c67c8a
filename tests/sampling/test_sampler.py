"""One batch of rows that each ask for something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pykv.sampling import SamplingParams
from pykv.sampling.row_parameters import Placement
from pykv.sampling.sampler import Sampler, _likeliest_on_device
from pykv.sampling.token_logprobs import LOWEST_LOGPROB

VOCAB = 300
PROMPT = np.array([3, 4, 4, 7], np.int32)


def placement(seed=1, child=0, output=(), ending=(), **options):
    params = SamplingParams(**options)
    return Placement(params, seed, child, PROMPT, list(output), frozenset(ending))


def sampler_of(*placements):
    sampler = Sampler(VOCAB, 16, torch.device("cpu"))
    for row, placed in enumerate(placements):
        sampler.place(row, placed)
    return sampler


def sample(sampler, logits, rows=None, positions=None):
    rows = np.arange(len(logits), dtype=np.int32) if rows is None else np.array(rows, np.int32)
    positions = np.full(len(rows), len(PROMPT)) if positions is None else np.array(positions)
    return sampler.sample(logits.clone(), rows, positions)


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_first_of_the_likeliest():
    logits = torch.zeros(2, VOCAB)
    logits[0, [5, 9]] = 3.0
    assert sample(
        sampler_of(placement(temperature=0), placement(temperature=0)), logits
    ).token_ids.tolist() == [5, 0]


@pytest.mark.parametrize("options", [{"temperature": 1e-9}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_choice_is_greedy(options):
    logits = random_logits(1)
    assert sample(sampler_of(placement(**options)), logits).token_ids[0] == logits.argmax()


def test_a_row_samples_the_same_alone_and_in_any_order_of_rows():
    options = [
        {},
        {"top_k": 5},
        {"temperature": 0},
        {"top_p": 0.5, "logit_bias": {3: 4.0}},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "temperature": 0.7},
        {"logprobs": 2},
    ]
    placements = [placement(seed=index, **each) for index, each in enumerate(options)]
    logits = random_logits(len(options))
    together = sample(sampler_of(*placements), logits).token_ids
    backwards = list(range(len(options)))[::-1]
    turned = sample(sampler_of(*placements), logits[backwards], rows=backwards).token_ids
    assert turned[::-1].tolist() == together.tolist()
    for index, each in enumerate(placements):
        assert sample(sampler_of(each), logits[index : index + 1]).token_ids[0] == together[index]


def test_samples_of_one_request_differ_and_can_be_repeated():
    logits = torch.zeros(8, VOCAB)
    placements = [placement(seed=7, child=child) for child in range(8)]
    first = sample(sampler_of(*placements), logits).token_ids
    assert len(set(first.tolist())) > 4
    assert sample(sampler_of(*placements), logits).token_ids.tolist() == first.tolist()


def test_positions_of_one_sequence_draw_anew():
    sampler = sampler_of(placement())
    drawn = {
        int(sample(sampler, torch.zeros(1, VOCAB), positions=[position]).token_ids[0])
        for position in range(16)
    }
    assert len(drawn) > 8


def test_tokens_come_as_often_as_the_model_says():
    sampler = sampler_of(placement())
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 10:13] = torch.tensor([0.2, 0.3, 0.5]).log()
    drawn = [int(sample(sampler, logits, positions=[position]).token_ids[0]) for position in range(2000)]
    assert [drawn.count(token_id) / 2000 for token_id in (10, 11, 12)] == pytest.approx(
        [0.2, 0.3, 0.5], abs=0.04
    )


def test_temperature_sharpens_and_flattens():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :2] = torch.tensor([0.0, 1.0])
    for temperature in (0.5, 2.0):
        sampler = sampler_of(placement(temperature=temperature))
        ones = sum(
            int(sample(sampler, logits, positions=[position]).token_ids[0]) for position in range(1000)
        )
        assert ones / 1000 == pytest.approx(torch.sigmoid(torch.tensor(1.0 / temperature)).item(), abs=0.05)


def test_repetition_penalty_equals_that_of_transformers():
    logits = random_logits(1)
    seen = torch.tensor([[3, 4, 4, 7, 20]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    sampler = sampler_of(placement(temperature=0, repetition_penalty=1.7, output=[20]))
    for bias in ({3: 50.0}, {20: 50.0}):  # the likeliest with the bias on top shows each penalized logit
        sampler.place(1, placement(temperature=0, repetition_penalty=1.7, output=[20], logit_bias=bias))
        lifted = expected.clone()
        lifted[0, next(iter(bias))] += 50.0
        assert sample(sampler, logits, rows=[1]).token_ids[0] == lifted.argmax()
    assert sample(sampler, logits).token_ids[0] == expected.argmax()


def test_presence_counts_once_and_frequency_each_time_and_neither_the_prompt():
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 20], logits[:, 21] = 1.0, 3.0, 2.5
    sampler = sampler_of(
        placement(temperature=0, presence_penalty=1.0, output=[20, 20]),
        placement(temperature=0, frequency_penalty=1.0, output=[20, 21, 21]),
        placement(temperature=0, frequency_penalty=1.0, output=[20, 20, 20, 21, 21]),
    )
    assert sample(sampler, logits).token_ids.tolist() == [21, 20, 3]


def test_sampled_tokens_count_for_the_next_step():
    sampler = sampler_of(placement(temperature=0, frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 30], logits[0, 31] = 1.5, 1.0
    assert [int(sample(sampler, logits).token_ids[0]) for _ in range(4)] == [30, 31, 30, 0]


def test_placing_a_sequence_again_gives_the_counts_that_it_had():
    logits = random_logits(1)
    options = {"temperature": 0, "frequency_penalty": 2.0, "repetition_penalty": 2.0}
    sampler, output = sampler_of(placement(**options)), []
    for _ in range(6):
        again = sampler_of(placement(output=output, **options))
        output.append(int(sample(sampler, logits).token_ids[0]))
        assert sample(again, logits).token_ids[0] == output[-1]


def test_logit_bias_moves_single_tokens():
    logits = random_logits(2)
    sampler = sampler_of(
        placement(temperature=0, logit_bias={0: 100.0}),
        placement(temperature=0, logit_bias={int(logits[1].argmax()): -100.0, 44: 100.0}),
    )
    assert sample(sampler, logits).token_ids.tolist() == [0, 44]


def test_a_row_with_few_biases_after_one_with_many_keeps_none_of_them():
    logits = random_logits(1)
    sampler = sampler_of(placement(temperature=0, logit_bias={44: 100.0, 45: 50.0}))
    sampler.place(0, placement(temperature=0, logit_bias={46: 1e-6}))
    assert sample(sampler, logits).token_ids[0] == logits.argmax()


def test_min_tokens_bans_the_ending_tokens_until_then():
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.0, 1.0
    sampler = sampler_of(placement(temperature=0, min_tokens=2, ending=[8]))
    drawn = [int(sample(sampler, logits, positions=[len(PROMPT) + step]).token_ids[0]) for step in range(3)]
    assert drawn == [9, 9, 8]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"repetition_penalty": 2.0}, {"logprobs": 3}])
def test_a_broken_row_fails_alone(bad, options):
    logits = random_logits(3)
    sampler = sampler_of(*[placement(**options)] * 3)
    expected = sample(sampler_of(*[placement(**options)] * 3), logits).token_ids
    logits[1, 250] = bad
    samples = sample(sampler, logits)
    assert samples.failed.tolist() == [False, True, False]
    assert samples.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_row_without_any_possible_token_fails():
    samples = sample(sampler_of(placement()), torch.full((1, VOCAB), -torch.inf))
    assert samples.failed.tolist() == [True]


def test_logprobs_are_those_of_the_model_whatever_was_changed():
    logits = random_logits(2)
    sampler = sampler_of(
        placement(temperature=0),
        placement(temperature=0, logprobs=3, logit_bias={50: 100.0}, repetition_penalty=2.0),
    )
    samples = sample(sampler, logits)
    expected = logits[1].log_softmax(-1)
    assert list(samples.logprobs) == [1]
    entry = samples.logprobs[1]
    assert entry.token_id == 50
    assert entry.logprob == pytest.approx(expected[50].item(), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[50]).sum())
    assert entry.top_token_ids == tuple(expected.topk(3).indices.tolist())
    assert entry.top_logprobs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_an_impossible_token_has_a_finite_logprob():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 5] = 0.0
    entry = sample(sampler_of(placement(logprobs=2)), logits).logprobs[0]
    assert entry.top_logprobs == (0.0, LOWEST_LOGPROB)


def test_on_a_device_the_likeliest_tokens_are_the_same_and_are_read_at_once():
    logits = torch.randn(5, 300)
    logits[1, 7] = torch.nan
    logits[2, :] = torch.inf
    logits[3, 299] = 3.0e38
    token_ids, largest = _likeliest_on_device(logits)
    assert np.array_equal(token_ids, logits.numpy().argmax(-1))
    assert np.array_equal(largest, logits.max(-1).values.double().numpy(), equal_nan=True)
