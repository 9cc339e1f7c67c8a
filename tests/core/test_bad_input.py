"""Every parameter of the core's Python face gets values of wrong kinds: all are refused by name, changing nothing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from junk import Call, each, faults

from pykv import blocks, events, recording, scheduler, scope
from pykv.blocks import BlockPool, BlockTable, PrefixCache
from pykv.events import content_keys
from pykv.recording import Recording, replay_recording
from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers
from pykv.scope import scope_of

SECONDS = {"float", "whole float", "huge"}
TOKENS = {"list", "int array", "int32 array"}


class World:
    """One object of each kind, in the middle of its life."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            num_blocks=64,
            block_size=4,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            num_lookahead_tokens=2,
            max_pinned_blocks=8,
        )
        self.scheduler, self.buffers = Scheduler(config), StepBuffers(config)
        self.scheduler.submit(range(9), max_tokens=30, session="s", tenant=b"t")
        first = self.scheduler.plan(self.buffers, 1.0)
        assert first is not None
        self.scheduler.apply(first, np.array([5]), np.array([OUTCOME_OK], np.uint8))
        pin = self.scheduler.pin(range(9))
        assert pin is not None
        self.pin = pin
        busy = Scheduler(config)
        busy.submit([1, 2, 3])
        plan = busy.plan(StepBuffers(config))
        assert plan is not None
        self.in_flight = busy, plan
        self.pool = BlockPool(64, 4)
        self.cache = PrefixCache(self.pool)
        self.table, _ = self.cache.share(range(9))
        self.cache.extend(self.table, 3)
        self.cache.publish(self.table, range(9), num_tokens=4)

    def state(self) -> list[object]:
        """All that can be counted; what is broken is found."""
        schedulers = (self.scheduler, self.in_flight[0])
        for checked in (*schedulers, self.cache):
            checked.check()
        counts = [
            getattr(scheduler.stats(), name)
            for scheduler in schedulers
            for name in dir(scheduler.stats())
            if not name.startswith("_")
        ]
        return [
            *counts,
            self.pool.count(),
            self.cache.count(),
            self.cache.num_evictions,
            self.table.block_ids(),
        ]


def config_options() -> dict[str, set[str]]:
    """What junk each option takes."""
    switches = ("preempt_lower_ranks", "enable_prefix_caching", "report_other_scopes")
    optional = ("max_chunk_tokens", "max_queued_tokens", "max_pinned_blocks_per_tenant")
    return each(switches, {"bool"}) | each(optional, {"none"})


def calls(world: World, folder: Path) -> Iterator[Call]:
    steps, pool, cache, table = world.scheduler, world.pool, world.cache, world.table
    retention = {"none", *SECONDS}
    yield Call(
        steps.submit,
        {
            "prompt": [1, 2],
            "max_tokens": 1,
            "num_samples": 1,
            "scope": b"",
            "reuse_cached": True,
            "tenant": b"",
            "priority": 0,
            "deadline": 1.0,
            "session": "s",
            "ttl": 1.0,
            "next_turn": 1.0,
            "retention_priority": 0,
            "media": (),
        },
        {
            "prompt": TOKENS,
            "max_tokens": {"none"},
            "scope": {"bytes"},
            "reuse_cached": {"bool"},
            "tenant": {"bytes"},
            "priority": {"negative"},
            "deadline": retention,
            "session": {"none", "bytes", "text", "empty text", "text with a null"},
            "ttl": retention,
            "next_turn": retention,
            "retention_priority": {"negative"},
        },
    )
    yield Call(steps.cached_tokens, {"tokens": [1], "scope": b""}, {"tokens": TOKENS, "scope": {"bytes"}})
    yield Call(
        steps.end_session,
        {"session": "nobody", "tenant": b""},
        {"session": {"bytes", "text", "empty text", "text with a null"}, "tenant": {"bytes"}},
    )
    yield Call(
        steps.pin,
        {"tokens": [9], "scope": b"", "tenant": b""},
        {"tokens": TOKENS, "scope": {"bytes"}, "tenant": {"bytes"}},
    )
    yield Call(steps.unpin, {"pin": world.pin})
    yield Call(steps.set_cache_share, {"tenant": b"t", "share": 0.5}, {"tenant": {"bytes"}})
    yield Call(steps.num_cached_tokens, {"request": 99})
    yield Call(steps.abort, {"request": 99})
    yield Call(steps.pause, {"request": 99})
    yield Call(steps.resume, {"request": 99})
    yield Call(steps.plan, {"buffers": world.buffers, "now": 2.0}, {"now": SECONDS})
    yield Call(
        steps.propose,
        {"rows": np.zeros(0, np.int32), "starts": np.zeros(1, np.int32), "tokens": np.zeros(0, np.int64)},
        # Three rows are fine, for more starts.
        {"rows": {"int32 array"}},
    )
    in_flight, plan = world.in_flight
    results = {"sampled": np.array([5]), "outcomes": np.array([OUTCOME_OK], np.uint8)}
    yield Call(
        in_flight.apply,
        {"plan": plan, **results, "failed_rows": None, "accepted": None},
        {"failed_rows": {"none"}, "accepted": {"none"}},
    )
    yield Call(in_flight.discard, {"plan": plan})
    yield Call(
        steps.set_costs,
        {"seconds_per_token": 0.0, "seconds_per_block": 0.0},
        each(("seconds_per_token", "seconds_per_block"), SECONDS),
    )
    yield Call(steps.record, {"path": folder / "never"}, {"path": {"text"}})
    yield Call(Scheduler, {"config": steps.config})
    yield Call(SchedulerConfig, dataclasses.asdict(steps.config), config_options())
    yield Call(
        StepBuffers,
        {"config": steps.config, "page_lists": False, "arrays": None},
        {"page_lists": {"bool"}, "arrays": {"none"}},
    )
    yield Call(BlockPool, {"num_blocks": 64, "block_size": 4})
    yield Call(pool.references, {"block_id": 1})
    yield Call(table.extend, {"count": 1})
    yield Call(table.truncate, {"length": 3})
    yield Call(table.is_writable, {"index": 1})
    yield Call(table.copy_on_write, {"index": 1})
    yield Call(cache.copy_on_write, {"table": table, "index": 1})
    yield Call(PrefixCache, {"pool": BlockPool(64, 4), "eviction": "lru"})
    yield Call(cache.probe, {"tokens": [1], "scope": b""}, {"tokens": TOKENS, "scope": {"bytes"}})
    yield Call(
        cache.share,
        {"tokens": [1], "scope": b"", "max_tokens": None},
        {"tokens": TOKENS, "scope": {"bytes"}, "max_tokens": {"none"}},
    )
    yield Call(cache.extend, {"table": table, "count": 1})
    yield Call(
        cache.publish,
        {"table": table, "tokens": [1], "num_tokens": 1, "scope": b""},
        {"tokens": TOKENS, "scope": {"bytes"}},
    )
    yield Call(
        content_keys,
        {"tokens": [1], "block_size": 4, "scope": b"", "media": ()},
        {"tokens": TOKENS, "scope": {"bytes"}},
    )
    named = {"none", "bytes", "text", "empty text", "text with a null"}
    yield Call(
        scope_of,
        {"model": None, "adapter": None, "adapter_generation": 0, "tenant": None, "salt": None},
        each(("model", "adapter", "tenant", "salt"), named),
    )
    yield Call(
        replay_recording,
        {"path": folder / "none", "allow_cut": True},
        {"path": {"text"}, "allow_cut": {"bool"}},
    )


def test_junk_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    world = World()
    wrong, num_refused = faults(calls(world, tmp_path), world.state, documented=True)
    assert not wrong, "\n".join(wrong)
    assert num_refused > 2000
    assert list(tmp_path.iterdir()) == []


def test_no_public_parameter_is_left_out(tmp_path: Path) -> None:
    modules = (scheduler, blocks, events, recording, scope)
    public = {getattr(module, name) for module in modules for name in module.__all__}
    functions = {thing for thing in public if inspect.isfunction(thing)}
    functions |= {
        method
        for thing in public - {BlockTable, Recording}
        if inspect.isclass(thing)
        for name, method in inspect.getmembers(thing, inspect.isfunction)
        if not name.startswith("_")
    }
    wanted = {
        (function.__qualname__, parameter)
        for function in functions
        for parameter in inspect.signature(function).parameters
        if parameter != "self"
    }
    sent = {
        (call.function.__qualname__, field) for call in calls(World(), tmp_path) for field in call.arguments
    }
    assert len(wanted) > 40
    assert wanted - sent == set()
