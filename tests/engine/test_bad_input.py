"""Every parameter of the engine's Python face gets values of wrong kinds: all are refused by name, changing nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect

import pytest
import torch
from junk import Call, each, faults

from pykv import KvLayout
from pykv.engine.async_engine import AsyncEngine
from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.kv_pool import KvPool
from pykv.layer_groups import StateGroup, StateTensor
from pykv.layout import KvLayer
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.state_pool import StatePool
from pykv.text.tokenizer import TextTokenizer

TEXTS = {"text", "text with a null"}
PROMPT = {*TEXTS, "list", "int array", "int32 array"}
SESSION = {*TEXTS, "bytes"}
ONE_TOKEN = SamplingParams(max_tokens=1)
MESSAGES = [{"role": "user", "content": "hi"}]
LAYOUT = KvLayout((KvLayer(1, 4, 4),))
GROUP = StateGroup(((StateTensor((2,)),),))


@pytest.fixture(autouse=True)
def _a_chat_template(monkeypatch):
    monkeypatch.setattr(TextTokenizer, "_rendered", lambda self, messages, options: str(messages))


@pytest.fixture
def engine(make_toy_engine):
    with make_toy_engine(max_pinned_blocks=8) as made:
        made.generate([[1, 2, 3] * 20], ONE_TOKEN)
        yield made


def of_engine(engine):
    use = {"scope": b"", "tenant": b""}
    allowed = {"scope": {"bytes"}, "tenant": {"bytes"}}
    # A generator is a sequence of prompts, but can be looked at once only.
    prompts = {*TEXTS, "list of text", "text array", "ragged list", "matrix", "empty array", "generator"}
    yield Call(
        engine.generate,
        {"prompts": ["a"], "params": ONE_TOKEN, "retention": Retention()},
        {"prompts": prompts, "params": {"none"}},
        {"prompts": "prompt"},
    )
    yield Call(
        engine.chat,
        {"messages": MESSAGES, "params": ONE_TOKEN, "retention": Retention()},
        {"params": {"none"}},
    )
    yield Call(
        engine.add_request,
        {
            "prompt": "a",
            "params": ONE_TOKEN,
            "request_id": None,
            **use,
            "retention": Retention(),
            "media": (),
        },
        {**allowed, "prompt": PROMPT, "request_id": {"none", "empty text", *TEXTS}},
    )
    yield Call(
        engine.new_request,
        {"prompt": "a", "params": ONE_TOKEN, "request_id": None},
        {"prompt": PROMPT, "request_id": {"none", "empty text", *TEXTS}},
    )
    for method in (engine.abort, engine.pause, engine.resume):
        yield Call(method, {"request_id": "nobody"}, {"request_id": {"empty text", *TEXTS}})
    yield Call(
        engine.end_session,
        {"session_id": "nobody", "tenant": b""},
        {"session_id": SESSION, "tenant": {"bytes"}},
    )
    yield Call(engine.pin, {"prompt": "a", **use}, {**allowed, "prompt": PROMPT})
    yield Call(engine.unpin, {"pin": None})
    yield Call(engine.set_cache_share, {"tenant": b"t", "share": 0.5}, {"tenant": {"bytes"}})
    yield Call(engine.encode, {"prompt": "a"}, {"prompt": PROMPT})
    yield Call(
        engine.encode_chat,
        {"messages": MESSAGES, "template_options": None},
        {"template_options": {"none", "mapping", "mapping of numbers"}},
    )
    yield Call(engine.check_characters, {"num_characters": 1})
    # The names of models: what is none is looked for on the hub.
    yield Call(
        Engine,
        {"model": "bundled", "tokenizer": None, "config": None, "progress": None},
        {"model": TEXTS, **each(("tokenizer", "config"), {"none"}), "progress": {"none", "class"}},
    )
    yield Call(
        Engine.from_runner,
        {"runner": object(), "tokenizer": None, "config": None, "clock": dict},
        {"tokenizer": {"none"}, "config": {"none"}, "clock": {"class"}},
    )


def test_junk_is_refused_by_name_and_changes_nothing(engine):
    runner = engine.steps._runner
    calls = [
        call._replace(arguments=call.arguments | {"runner": runner}) if "runner" in call.arguments else call
        for call in of_engine(engine)
    ]

    def state():
        engine.steps.check()
        return engine.stats(), engine.has_requests

    wrong, num_refused = faults(calls, state)
    assert not wrong, "\n".join(wrong)
    assert num_refused > 800


@pytest.mark.parametrize(
    "call",
    [
        Call(
            EngineConfig,
            {entry.name: entry.default for entry in dataclasses.fields(EngineConfig)},
            each(
                (
                    "num_blocks",
                    "kv_memory_bytes",
                    "max_model_len",
                    "max_chunk_tokens",
                    "max_queued_tokens",
                    "kv_scales",
                ),
                {"none"},
            )
            | each(("cuda_graphs", "enable_prefix_caching"), {"bool"})
            | {"device": TEXTS},  # whether there is one of that name torch knows, when the model is loaded
        ),
        Call(
            SamplingParams,
            {
                entry.name: {} if entry.name == "logit_bias" else entry.default
                for entry in dataclasses.fields(SamplingParams)
            },
            each(("max_tokens", "seed", "logprobs", "prompt_logprobs"), {"none"})
            | each(("temperature", "repetition_penalty"), {"float", "whole float"})
            | each(("presence_penalty", "frequency_penalty"), {"negative", "float", "whole float"})
            | {
                "stop": {"none", *TEXTS, "list of text", "text array", "empty array", "mapping", "generator"},
                "stop_token_ids": {
                    *("none", "list", "set", "int array", "int32 array", "matrix", "empty array", "generator")
                },
                "ignore_eos": {"bool"},
                "logit_bias": {"none"},
            },
        ),
        Call(
            Retention,
            {"session_id": "s", "ttl_seconds": None, "next_turn_seconds": None, "priority": 0},
            {"session_id": {"none", *SESSION}, "priority": {"negative"}}
            | each(("ttl_seconds", "next_turn_seconds"), {"none", "float", "whole float", "huge"}),
        ),
        Call(
            KvPool,
            {
                "layout": LAYOUT,
                "num_blocks": 4,
                "block_size": 4,
                "format": "bf16",
                "device": "cpu",
                "groups": None,
                "is_pinned": False,
            },
            {"groups": {"none"}},
        ),
        Call(StatePool, {"group": GROUP, "num_slots": 4, "device": "cpu"}),
        Call(StatePool(GROUP, 4).copy, {"pairs": torch.zeros(0, 2, dtype=torch.int64)}),
        Call(StateTensor, {"shape": (1,), "dtype": "float32"}),
    ],
    ids=lambda call: call.function.__qualname__,
)
def test_options_and_pools_take_no_junk(call):
    wrong, num_refused = faults([call], lambda: None)
    assert not wrong, "\n".join(wrong)
    assert num_refused > 25


def of_async_engine(engine, run):
    """The calls of an engine that runs, each to its first result."""

    def first(method):
        @functools.wraps(method)
        def call(**arguments):
            async def ask():
                return await anext(method(**arguments))

            return run(ask())

        return call

    def waited(method):
        return functools.wraps(method)(lambda **arguments: run(method(**arguments)))

    shared = {"params": ONE_TOKEN, "request_id": None, "scope": b"", "tenant": b"", "retention": Retention()}
    allowed = {"scope": {"bytes"}, "tenant": {"bytes"}, "request_id": {"none", "empty text", *TEXTS}}
    yield Call(first(engine.generate), {"prompt": "a", **shared, "media": ()}, {**allowed, "prompt": PROMPT})
    yield Call(
        first(engine.chat),
        {"messages": MESSAGES, **shared, "template_options": None},
        {**allowed, "template_options": {"none", "mapping", "mapping of numbers"}},
    )
    yield Call(waited(engine.abort), {"request_id": "nobody"}, {"request_id": {"empty text", *TEXTS}})
    yield Call(
        engine.end_session,
        {"session_id": "nobody", "tenant": b""},
        {"session_id": SESSION, "tenant": {"bytes"}},
    )
    use = {"scope": b"", "tenant": b""}
    yield Call(
        waited(engine.pin),
        {"prompt": "a", **use},
        {"prompt": PROMPT, "scope": {"bytes"}, "tenant": {"bytes"}},
    )
    yield Call(engine.unpin, {"pin": None})
    yield Call(engine.set_cache_share, {"tenant": b"t", "share": 0.5}, {"tenant": {"bytes"}})
    yield Call(engine.listen_to_events, {"listener": None}, {"listener": {"none", "class"}})
    yield Call(AsyncEngine, {"engine": engine.engine, "max_pending_tokens": 8}, {})


def test_the_asynchronous_engine_takes_no_junk(make_toy_engine):
    with asyncio.Runner() as runner:
        engine = AsyncEngine(make_toy_engine())
        runner.run(engine.__aenter__())
        try:
            wrong, num_refused = faults(
                of_async_engine(engine, runner.run), lambda: (engine.stats().num_waiting, dict(engine._live))
            )
        finally:
            runner.run(engine.aclose())
    assert not wrong, "\n".join(wrong)
    assert num_refused > 600


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_no_public_parameter_is_left_out(engine, kind):
    methods = dict(inspect.getmembers(kind, inspect.isroutine))
    wanted = {
        (name, parameter)
        for name, method in methods.items()
        if not name.startswith("_")
        for parameter in inspect.signature(method).parameters
        if parameter not in ("self", "cls")
    }
    wanted |= {(kind.__name__, parameter) for parameter in inspect.signature(kind).parameters}
    calls = of_engine(engine) if kind is Engine else of_async_engine(AsyncEngine(engine), None)
    sent = {(call.function.__name__, field) for call in calls for field in call.arguments}
    assert len(wanted) > 15
    assert wanted - sent == set()
