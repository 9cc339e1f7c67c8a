"""The engine's options have the scheduler's bounds, and are refused before a model is looked at."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pykv.engine.config import SCHEDULER_OPTIONS, EngineConfig
from pykv.engine.engine import Engine
from pykv.engine.loading import load_runner
from pykv.errors import ConfigError
from pykv.host_memory import available_bytes
from pykv.scheduler import SchedulerConfig

BOUNDED = [
    entry.name
    for entry in dataclasses.fields(EngineConfig)
    if entry.name in (*SCHEDULER_OPTIONS, "num_blocks", "max_model_len") and "str" not in str(entry.type)
]


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test where a model is loaded."""

    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("pykv.models.load.find_checkpoint", loaded)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("value", [-1, 2**64, "x"])
def test_an_option_of_the_scheduler_is_refused_in_its_words(name, value):
    others = {} if name == "num_blocks" else {"num_blocks": 2**27}
    with pytest.raises(ConfigError) as of_scheduler:
        SchedulerConfig(**others, **{name: value})
    with pytest.raises(ConfigError) as of_engine:
        EngineConfig(**{name: value})
    assert str(of_engine.value) == str(of_scheduler.value)
    assert str(of_engine.value).startswith(f"{name} is ")


def test_there_are_such_options():
    assert len(BOUNDED) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block_size": 10**6, "num_blocks": 64},
            "block_size is 1000000: allowed is an integer from 1 to 65536",
        ),
        ({"max_num_seqs": 2**21}, "max_num_seqs is 2097152: allowed is an integer from 1 to 1048576"),
        ({"max_pinned_blocks": 100, "num_blocks": 64}, "max_pinned_blocks is 100"),
        ({"swap_space_bytes": 2**60}, "swap_space_bytes is"),
        ({"preemption": "swap"}, "swap_space_bytes is 0"),
    ],
)
def test_bounds_are_known_before_there_is_a_model(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "abacus"}, "device is 'abacus': allowed is the name of a torch device"),
        ({"device": "cuda:99"}, "device is 'cuda:99': allowed is a device that is there"),
        (
            {"swap_space_bytes": 2**47},
            r"swap_space_bytes is \d+: allowed is at most \d+, the bytes of cpu memory",
        ),
        ({"device": "cpu", "kv_memory_bytes": 2**47}, r"kv_memory_bytes is \d+: allowed is at most \d+"),
    ],
)
def test_what_the_machine_has_not_is_refused_by_the_field_that_was_set(no_model, options, message):
    with pytest.raises(ConfigError, match=message):
        Engine("bundled", config=EngineConfig(**options))
    with pytest.raises(ConfigError, match=message):
        load_runner("bundled", None, EngineConfig(**options), None)


def test_the_machine_has_less_than_the_most_that_these_tests_ask_for():
    assert (available_bytes() or 0) < 2**47
    assert torch.cuda.device_count() < 99
