"""Bad values are refused at the edge, by name, at once."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from pykv.errors import InvalidRequestError
from pykv.sampling import SamplingParams

BAD = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31 - 1),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("temperature", math.nan),
    ("temperature", -1),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_k", -1),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", math.nan),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", math.nan),
    ("seed", -1),
    ("seed", 2**64),
    ("stop", ("",)),
    ("stop", 5),
    ("stop", ["x" * 1_000_000]),
    ("stop", ["x"] * 10_000),
    ("stop", "\ud800"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", range(10_000_000)),
    ("ignore_eos", 1),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {-5: 1}),
    ("logit_bias", [(5, 1)]),
    ("logit_bias", dict.fromkeys(range(2000), 1.0)),
    ("logprobs", -1),
    ("logprobs", 49152),
    ("prompt_logprobs", True),
    ("n", 0),
    ("n", 1_000_000),
    ("n", None),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_value_is_refused_by_name_in_little_time(field, value):
    seconds = []
    for _ in range(3):  # a collection of garbage meets one of them
        start = time.process_time()
        with pytest.raises(InvalidRequestError, match=field) as caught:
            SamplingParams(**{field: value})
        seconds.append(time.process_time() - start)
    assert caught.value.field == field
    assert "allowed" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert min(seconds) < 0.1


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize("option", ["guided_json", "response_format", "structured_outputs", "grammar"])
def test_structured_output_is_refused_by_name(option):
    with pytest.raises(InvalidRequestError, match=f"{option}: structured output") as caught:
        SamplingParams.from_mapping({option: {}})
    assert caught.value.field == option


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="temprature"):
        SamplingParams.from_mapping({"temprature": 0.5})


def test_good_values_become_plain_types():
    params = SamplingParams.from_mapping(
        {"max_tokens": np.int64(5), "temperature": 0, "stop": "a", "stop_token_ids": [1, np.int32(2)]}
    )
    assert (params.max_tokens, params.temperature) == (5, 0.0)
    assert (params.stop, params.stop_token_ids) == (("a",), (1, 2))


@pytest.mark.parametrize("options", [{"stop_token_ids": [105]}, {"logit_bias": {105: 1.0}}])
def test_a_token_outside_the_vocabulary_is_refused(options):
    params = SamplingParams(**options)
    assert params.validated(106) is params
    with pytest.raises(InvalidRequestError, match="105"):
        params.validated(100)
