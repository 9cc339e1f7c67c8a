"""Events and content keys through the Python face, and why blocks were missed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pykv.errors import ConfigError, InvalidRequestError
from pykv.events import KvEventKind, KvEvents, content_keys
from pykv.scheduler import OUTCOME_OK, RequestSummary, Scheduler, SchedulerConfig, StepBuffers


def make_scheduler(**options: object) -> Scheduler:
    defaults: dict[str, object] = {
        "num_blocks": 9,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "max_kv_events": 100,
    }
    return Scheduler(SchedulerConfig(**(defaults | options)))  # type: ignore[arg-type]


def run(scheduler: Scheduler, tokens: range | list[int], **options: object) -> RequestSummary:
    scheduler.submit(tokens, max_tokens=1, **options)  # type: ignore[arg-type]
    plan = scheduler.plan(StepBuffers(scheduler.config))
    assert plan is not None
    (ended,) = scheduler.apply(plan, np.zeros(1, np.int64), np.full(1, OUTCOME_OK, np.uint8))
    return ended


def play(events: KvEvents, known: set[bytes]) -> None:
    for kind, key in zip(events.kinds, events.keys, strict=True):
        if kind == KvEventKind.STORED:
            known.add(key.tobytes())
        elif kind == KvEventKind.REMOVED:
            known.remove(key.tobytes())
        else:
            known.clear()


def test_events_name_blocks_by_keys_that_anybody_can_compute() -> None:
    scheduler = make_scheduler()
    media = [(5, b"cat")]
    run(scheduler, range(13), scope=b"scope", media=media)
    events = scheduler.take_events()
    keys = content_keys(range(13), block_size=4, scope=b"scope", media=media)
    assert (events.sequence, events.num_dropped, len(events)) == (0, 0, 3)
    np.testing.assert_array_equal(events.keys, keys[1:])
    np.testing.assert_array_equal(events.parent_keys, keys[:-1])
    np.testing.assert_array_equal(events.token_ids, np.arange(12).reshape(3, 4))
    assert events.kinds.tolist() == [KvEventKind.STORED] * 3
    assert events.is_first.tolist() == [True, False, False]
    assert len(scheduler.take_events()) == 0
    scheduler.reset_prefix_cache()
    assert scheduler.take_events().kinds.tolist() == [KvEventKind.CLEARED]


def test_keys_are_the_same_in_another_process() -> None:
    call = "content_keys(range(8), block_size=4, scope=b's').tobytes().hex()"
    code = f"from pykv.events import content_keys; print({call})"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == content_keys(range(8), block_size=4, scope=b"s").tobytes().hex()


def test_a_listener_that_missed_events_mends_itself_by_a_snapshot() -> None:
    scheduler = make_scheduler(max_kv_events=3)
    for first in (0, 100, 200):
        run(scheduler, range(first, first + 21))
    events = scheduler.take_events()
    assert (events.sequence, events.num_dropped, len(events)) == (20, 20, 3)
    known: set[bytes] = set()
    snapshot = scheduler.snapshot_events()
    play(snapshot, known)
    assert len(known) == scheduler.stats().blocks_cached
    run(scheduler, range(300, 305))
    later = scheduler.take_events()
    assert later.sequence == snapshot.sequence
    play(later, known)
    assert len(known) == len(scheduler.snapshot_events())


def test_no_events_are_kept_unless_asked_for() -> None:
    scheduler = make_scheduler(max_kv_events=0)
    run(scheduler, range(13))
    assert (len(scheduler.take_events()), len(scheduler.snapshot_events())) == (0, 0)


def test_a_request_says_why_its_blocks_were_not_found() -> None:
    scheduler = make_scheduler(report_other_scopes=True)
    first = run(scheduler, range(8))
    assert (first.missed_never_seen, first.missed_cap) == (2, 0)
    again = run(scheduler, range(8))
    assert (again.cached_tokens, again.missed_never_seen, again.missed_cap) == (4, 0, 1)
    other = run(scheduler, range(8), scope=b"other")
    assert (other.cached_tokens, other.missed_other_scope) == (0, 2)
    run(scheduler, range(100, 129))
    evicted = run(scheduler, range(9))
    assert (evicted.missed_evicted, evicted.missed_other_scope, evicted.missed_never_seen) == (2, 0, 0)
    stats = scheduler.stats()
    assert (stats.missed_never_seen, stats.missed_evicted, stats.missed_other_scope) == (9, 2, 2)
    assert (stats.missed_cap, stats.missed_in_flight, stats.forgotten_keys) == (1, 0, 0)


def test_what_cannot_have_keys_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        content_keys([1], block_size=0)
    with pytest.raises(InvalidRequestError, match="tokens"):
        content_keys([-1], block_size=4)
    with pytest.raises(InvalidRequestError, match="media is"):
        content_keys([1], block_size=4, media=[(0, "cat")])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="max_kv_events is -1"):
        make_scheduler(max_kv_events=-1)
