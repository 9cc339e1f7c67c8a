"""Sampled requests of the bundled model: with a seed, their tokens are the same alone and in company."""

from collections.abc import Iterator

import pytest

from pykv.engine import Engine, EngineConfig
from pykv.engine.outputs import Completion
from pykv.sampling import SamplingParams

pytestmark = pytest.mark.long

PROMPT = "Once upon a time there was"


@pytest.fixture(params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(
        "bundled", config=EngineConfig(num_blocks=256, dtype=request.param, max_num_seqs=16)
    ) as engine:
        yield engine


def sampled(engine: Engine, seed: int, company: int) -> Completion:
    """What a request says while so many others run, which are not seeded alike."""
    others = [f"number {index} " * (index + 1) for index in range(company)]
    params = [
        SamplingParams(max_tokens=16, seed=seed + index, logprobs=2, ignore_eos=True)
        for index in range(company + 1)
    ]
    return engine.generate([PROMPT, *others], params)[0].outputs[0]


def test_a_seeded_request_says_the_same_in_company(engine: Engine) -> None:
    for seed in range(3):
        alone = sampled(engine, seed, 0)
        for company in (1, 4, 15):
            found = sampled(engine, seed, company)
            assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)
