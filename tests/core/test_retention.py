"""Sessions, times to live, priorities, shares, pins and media through the Python face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykv.blocks import BlockPool, PrefixCache
from pykv.errors import ConfigError, InvalidRequestError, PinQuotaError
from pykv.recording import replay_recording
from pykv.scheduler import OUTCOME_OK, Pin, Scheduler, SchedulerConfig, StepBuffers


class Driver:
    """A scheduler of blocks of 4 tokens whose requests get one token each."""

    def __init__(self, num_usable_blocks: int, **options: object) -> None:
        defaults: dict[str, object] = {
            "num_blocks": num_usable_blocks + 1,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 64,
            "admission": "watermark",
            "watermark": 0.0,
        }
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | options)))  # type: ignore[arg-type]
        self.buffers = StepBuffers(self.scheduler.config)
        self.now = 0.0

    def run(self, tokens: range, **retention: object) -> int:
        """Returns how many tokens were found."""
        self.scheduler.submit(tokens, max_tokens=1, **retention)  # type: ignore[arg-type]
        plan = self.scheduler.plan(self.buffers, self.now)
        assert plan is not None
        (ended,) = self.scheduler.apply(
            plan, np.zeros(plan.num_samples, np.int64), np.full(plan.num_samples, OUTCOME_OK, np.uint8)
        )
        self.scheduler.check()
        return ended.cached_tokens


def prompt(first: int, num_blocks: int) -> range:
    return range(first, first + 4 * num_blocks)


def test_what_an_ended_session_leaves_makes_room_first() -> None:
    driver = Driver(12)
    driver.run(prompt(0, 4), session="old")
    driver.run(prompt(100, 4), session=b"ended")
    assert driver.scheduler.end_session("ended")
    assert not driver.scheduler.end_session("unknown")
    driver.run(prompt(200, 8))
    assert [driver.scheduler.cached_tokens(prompt(first, 4)) for first in (0, 100)] == [16, 0]
    assert driver.scheduler.stats().num_sessions == 1


def test_time_is_that_of_the_plans() -> None:
    driver = Driver(12)
    driver.run(prompt(0, 4), session="chat", next_turn=30.0, ttl=60.0)
    driver.run(prompt(100, 4))
    driver.now = 20.0
    driver.run(prompt(200, 7))
    assert driver.scheduler.cached_tokens(prompt(0, 4)) == 16, "its turn is expected"
    driver.now = 61.0
    driver.run(prompt(300, 6))
    assert driver.scheduler.cached_tokens(prompt(0, 4)) == 0, "it has expired"


def test_without_a_time_nothing_expires() -> None:
    driver = Driver(12)
    driver.run(prompt(0, 4), session="live", ttl=60.0, next_turn=30.0)
    driver.run(prompt(100, 4), session="over", ttl=0.0)
    driver.run(prompt(200, 5))
    assert driver.scheduler.cached_tokens(prompt(0, 4)) == 16, "its turn is expected for good"
    assert driver.scheduler.stats().num_sessions == 2, "no time to live has passed"


def test_priorities_and_shares_cross_the_border() -> None:
    driver = Driver(16, tenant_cache_share=0.25)
    driver.run(prompt(0, 4), tenant=b"modest", retention_priority=-2)
    driver.run(prompt(100, 8), tenant=b"greedy", retention_priority=2)
    driver.run(prompt(200, 6), tenant=b"third")
    assert [driver.scheduler.cached_tokens(prompt(first, 8)) for first in (0, 100)] == [16, 24]
    driver.scheduler.set_cache_share(b"greedy", 1.0)
    driver.scheduler.set_cache_share(b"third", 1.0)
    driver.run(prompt(300, 2), tenant=b"third")
    assert driver.scheduler.cached_tokens(prompt(0, 8)) == 8, (
        "nobody is above its share: the lowest priority goes"
    )


def test_a_pin_keeps_a_prefix_within_its_quota() -> None:
    driver = Driver(12, max_pinned_blocks=4, max_pinned_blocks_per_tenant=3)
    assert driver.scheduler.config.max_seq_len == 32
    driver.run(prompt(0, 3))
    assert driver.scheduler.pin(prompt(50, 3)) is None
    pin = driver.scheduler.pin(prompt(0, 3), tenant=b"a")
    assert pin == Pin(id=0, num_tokens=12, num_blocks=3)
    with pytest.raises(
        PinQuotaError, match="the tenant's pins hold 3 blocks and 1 more were asked for: allowed are 3"
    ):
        driver.scheduler.pin(prompt(0, 1), tenant=b"a")
    with pytest.raises(PinQuotaError, match="pins hold 3 blocks and 2 more were asked for: allowed are 4"):
        driver.scheduler.pin(prompt(0, 2), tenant=b"b")
    for first in (100, 200, 300):
        driver.run(prompt(first, 7))
    assert driver.scheduler.cached_tokens(prompt(0, 3)) == 12
    assert driver.scheduler.stats().pinned_blocks == 3
    assert driver.scheduler.unpin(pin)
    assert not driver.scheduler.unpin(pin)
    driver.scheduler.check()


def test_placeholders_match_only_with_the_same_media_at_the_same_offset() -> None:
    driver = Driver(64, max_model_len=256)
    tokens = [*range(6), *[99] * 10, *range(6)]

    def run(*media: tuple[int, bytes]) -> int:
        return driver.run(tokens, media=media)  # type: ignore[arg-type]

    cat, dog = b"hash of a cat", b"hash of a dog"
    assert [run((6, cat)), run((6, dog)), run((6, cat))] == [0, 4, 20]
    assert run((7, cat)) == 4, "another offset in the same block"
    assert run() == 4
    assert [run((6, cat), (11, dog)), run((6, dog), (11, cat)), run((6, cat), (11, dog))] == [8, 8, 20]
    assert driver.run(tokens, scope=b"other", media=[(6, cat)]) == 0  # type: ignore[arg-type]
    driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.stats().num_scopes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl", -1.0),
        ("ttl", float("nan")),
        ("next_turn", 3.0),
        ("retention_priority", 3),
        ("retention_priority", 300),
        ("session", 7),
        ("media", [(1, "text")]),
        ("media", [(9, b"x")]),
        ("media", [(2, b"x"), (2, b"y")]),
        ("media", [(0, b"")]),
        ("media", [(0, b"x" * 65)]),
        ("media", [(-1, b"x")]),
        ("media", [3]),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, value: object) -> None:
    driver = Driver(12)
    with pytest.raises(InvalidRequestError, match=f"{field} is") as caught:
        driver.scheduler.submit(range(9), **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert driver.scheduler.stats().num_requests == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("eviction", "fifo"),
        ("tenant_cache_share", 1.5),
        ("tenant_cache_share", float("nan")),
        ("max_pinned_blocks", 12),
        ("max_pinned_blocks_per_tenant", -1),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"(?i){option} is {value!r}"):
        Driver(12, **{option: value})
    with pytest.raises(ConfigError, match="eviction is 'fifo': allowed is lru or segmented_lru"):
        PrefixCache(BlockPool(8, 4), eviction="fifo")


@pytest.mark.parametrize(("eviction", "left"), [("lru", 0), ("segmented_lru", 8)])
def test_a_scan_pushes_out_what_was_hit_under_lru_only(eviction: str, left: int) -> None:
    cache = PrefixCache(BlockPool(13, 4), eviction=eviction)

    def run(tokens: range) -> None:
        table, cached = cache.share(tokens)
        cache.extend(table, -(-len(tokens) // 4) - cached // 4)
        cache.publish(table, tokens, num_tokens=len(tokens))
        del table
        cache.check()

    run(range(9))
    run(range(9))
    for first in range(100, 1000, 20):
        run(range(first, first + 16))
    assert cache.probe(range(9)) == left


def test_a_recording_holds_what_retention_was_told(tmp_path: Path) -> None:
    driver = Driver(12, max_pinned_blocks=4, eviction="segmented_lru", tenant_cache_share=0.5)
    scheduler = driver.scheduler
    with scheduler.record(tmp_path / "run"):
        driver.run(prompt(0, 3), session="a", ttl=3.0, next_turn=1.0, retention_priority=-1, tenant=b"t")
        driver.run(prompt(0, 3), media=[(3, b"cat"), (8, b"dog")])
        scheduler.set_cache_share(b"t", 0.25)
        pin = scheduler.pin(prompt(0, 2))
        assert pin is not None
        scheduler.end_session("a", tenant=b"t")
        with pytest.raises(PinQuotaError):
            scheduler.pin(prompt(0, 3))
        scheduler.unpin(pin)
        driver.now = 9.0
        driver.run(prompt(100, 7))
    assert replay_recording(tmp_path / "run").num_calls == 14


def test_a_session_belongs_to_its_tenant() -> None:
    driver = Driver(12)
    driver.run(prompt(0, 3), session="s", tenant=b"a")
    ends: list[Callable[[], bool]] = [
        lambda: driver.scheduler.end_session("s"),
        lambda: driver.scheduler.end_session("as"),
        lambda: driver.scheduler.end_session("s", tenant=b"b"),
        lambda: driver.scheduler.end_session("s", tenant=b"a"),
    ]
    assert [end() for end in ends] == [False, False, False, True]
