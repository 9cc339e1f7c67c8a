"""Sessions, times to live, pins, shares and events through the engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pykv.engine.async_engine import AsyncEngine
from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.errors import ConfigError, InvalidRequestError, PinQuotaError
from pykv.events import KvEventKind, content_keys
from pykv.retention import Retention
from pykv.sampling import SamplingParams

BLOCK, USABLE = 4, 25
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt(first: int, num_blocks: int) -> list[int]:
    """So many full blocks and one token more, of tokens that no other `first` gives."""
    return [(first * 31 + place * 7) % 250 for place in range(num_blocks * BLOCK + 1)]


@pytest.fixture
def make_engine(make_toy_engine):
    def make(clock=None, **options):
        options = {"watermark": 0.0, "admission": "watermark", "max_num_seqs": 4} | options
        engine = make_toy_engine(num_blocks=USABLE + 1, block_size=BLOCK, max_model_len=80, **options)
        return (
            engine
            if clock is None
            else Engine.from_runner(engine.steps._runner, None, engine.config, clock=clock)
        )

    return make


def cached_tokens(engine, tokens, **options):
    """Runs one request and returns how much of its prompt it found."""
    (output,) = engine.generate([tokens], ONE, **options)
    engine.steps.check()
    return output.usage.cached_tokens


def press(engine, num_blocks, first=100):
    """Fills so many blocks with prompts that nobody asks for again."""
    for number in range(num_blocks // 6):
        cached_tokens(engine, prompt(first + number, 6))


@pytest.mark.parametrize(
    ("retention", "found"), [(Retention(), 0), (Retention(session_id="chat", next_turn_seconds=60.0), 24)]
)
def test_a_sessions_second_turn_hits_after_pressure_that_evicts_others(make_engine, retention, found):
    engine = make_engine()
    first = prompt(1, 6)
    cached_tokens(engine, first, retention=retention)
    press(engine, 36)
    second = [*first, 9, 9, 9]
    assert cached_tokens(engine, second, retention=retention) == found


def test_an_ended_session_makes_room_before_older_blocks(make_engine):
    engine = make_engine()
    old, ended = prompt(1, 6), prompt(2, 6)
    cached_tokens(engine, old, retention=Retention(session_id="old"))
    cached_tokens(engine, ended, retention=Retention(session_id=b"ended", next_turn_seconds=60.0))
    assert engine.end_session("ended")
    assert not engine.end_session("ended")
    press(engine, 18)
    assert cached_tokens(engine, old) == 24
    assert cached_tokens(engine, ended) == 0


def test_a_session_is_one_tenants(make_engine):
    engine = make_engine()
    engine.add_request(prompt(1, 2), ONE, tenant=b"a", retention=Retention(session_id="s"))
    while engine.has_requests:
        engine.step()
    assert [engine.end_session("s", tenant=tenant) for tenant in (b"", b"b", b"a")] == [False, False, True]


def test_a_time_to_live_is_counted_by_the_clock_that_was_given(make_engine):
    now = [1000.0]
    engine = make_engine(clock=lambda: now[0])
    kept, expired = prompt(1, 6), prompt(2, 6)
    cached_tokens(engine, kept)
    cached_tokens(engine, expired, retention=Retention(ttl_seconds=60.0))
    now[0] += 59.0
    press(engine, 6)
    now[0] += 2.0
    press(engine, 12, first=200)
    assert cached_tokens(engine, kept) == 24
    assert cached_tokens(engine, expired) == 0


def test_a_lower_priority_makes_room_first(make_engine):
    engine = make_engine()
    high, low = prompt(1, 6), prompt(2, 6)
    cached_tokens(engine, high, retention=Retention(priority=1))
    cached_tokens(engine, low, retention=Retention(priority=-1))
    press(engine, 18)
    assert cached_tokens(engine, high) == 24


def test_a_pin_keeps_a_prefix_until_it_is_given_up(make_engine):
    engine = make_engine(max_pinned_blocks=6)
    tokens = prompt(1, 6)
    assert engine.pin(tokens) is None
    cached_tokens(engine, tokens)
    pin = engine.pin(tokens)
    assert (pin.num_tokens, pin.num_blocks) == (24, 6)
    with pytest.raises(PinQuotaError, match="allowed are 6"):
        engine.pin(tokens[:8])
    press(engine, 36)
    assert cached_tokens(engine, tokens) == 24
    assert engine.unpin(pin)
    assert not engine.unpin(pin)


def test_a_tenant_above_its_share_makes_room_first(make_engine):
    engine = make_engine(tenant_cache_share=0.25)

    def run(tokens, tenant):
        engine.add_request(tokens, ONE, tenant=tenant)
        return [delta for delta in drain(engine) if delta.usage][-1].usage.cached_tokens

    modest, greedy = prompt(1, 6), prompt(2, 6)
    run(modest, b"modest")
    run(greedy, b"greedy")
    engine.set_cache_share(b"greedy", 0.0)
    for number in range(2):
        run(prompt(100 + number, 6), b"third")
    run(prompt(102, 2), b"greedy")
    assert run(modest, b"modest") == 24
    with pytest.raises(InvalidRequestError, match="share is"):
        engine.set_cache_share(b"greedy", 1.5)


def test_placeholders_of_other_media_are_not_hit(make_engine):
    engine = make_engine()
    tokens, found = prompt(1, 4), []
    for image in (b"cat", b"dog", b"cat"):
        engine.add_request(tokens, ONE, media=[(5, image)])
        found.append([delta for delta in drain(engine) if delta.usage][-1].usage.cached_tokens)
    assert found == [0, 4, 16]


def test_events_are_kept_where_they_are_asked_for(make_engine):
    engine, silent = make_engine(max_kv_events=100), make_engine()
    for each in (engine, silent):
        cached_tokens(each, prompt(1, 3))
    events = engine.take_events()
    keys = content_keys(prompt(1, 3), block_size=BLOCK)
    np.testing.assert_array_equal(events.keys, keys[1:])
    assert (events.sequence, len(engine.take_events())) == (0, 0)
    assert engine.snapshot_events().sequence == 3
    assert (len(silent.take_events()), len(silent.snapshot_events())) == (0, 0)


@pytest.mark.asyncio
async def test_a_listener_is_told_behind_each_step(make_engine):
    told = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with AsyncEngine(make_engine(max_kv_events=100, max_pinned_blocks=2)) as engine:
        engine.listen_to_events(lambda events: loop.call_soon_threadsafe(told.put_nowait, events))
        stream = engine.generate(prompt(1, 3), ONE, retention=Retention(session_id="s"), tenant=b"t")
        assert [delta async for delta in stream][-1].usage.cached_tokens == 0
        events = await asyncio.wait_for(told.get(), 20)
        assert (events.sequence, events.kinds.tolist()) == (0, [KvEventKind.STORED] * 3)
        assert engine.snapshot_events().sequence == 3
        assert (await engine.pin(prompt(1, 2), tenant=b"t")).num_blocks == 2
        engine.listen_to_events(None)
        assert [delta async for delta in engine.generate(prompt(2, 3), ONE)]
        assert engine.end_session("s", tenant=b"t")
        assert len(engine.engine.take_events()) == 3
    assert told.empty()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", 7),
        ("session_id", ""),
        ("ttl_seconds", -1.0),
        ("ttl_seconds", float("nan")),
        ("ttl_seconds", "3"),
        ("next_turn_seconds", float("inf")),
        ("next_turn_seconds", 3.0),
        ("priority", 3),
        ("priority", True),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=f"{field} is .*: allowed is ") as refusal:
        Retention(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tenant_cache_share", 1.5),
        ("tenant_cache_share", None),
        ("max_kv_events", -1),
        ("max_pinned_blocks", 1.0),
    ],
)
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        EngineConfig(**{option: value})


def drain(engine):
    deltas = []
    while engine.has_requests:
        deltas += engine.step()
    engine.steps.check()
    return deltas
