"""What the Python face takes and refuses at its edges: memory, token ids, media, names and numbers."""

from __future__ import annotations

import numpy as np
import pytest

import pykv
from pykv.errors import InvalidRequestError, PinQuotaError, QueueFullError, StepError
from pykv.events import content_keys

CONFIG = pykv.SchedulerConfig(num_blocks=32, block_size=4, max_num_seqs=4, num_lookahead_tokens=2)
OK = np.zeros(1, np.uint8)


def started() -> tuple[pykv.Scheduler, pykv.Plan]:
    scheduler = pykv.Scheduler(CONFIG)
    scheduler.submit([1, 2, 3])
    plan = scheduler.plan(pykv.StepBuffers(CONFIG))
    assert plan is not None
    return scheduler, plan


def misaligned(dtype: type[np.generic], length: int) -> np.ndarray:
    raw = np.zeros(length * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype)


def test_memory_that_is_not_aligned_is_copied_where_it_is_read_and_refused_by_name_where_it_is_shared() -> (
    None
):
    scheduler = pykv.Scheduler(CONFIG)
    tokens = misaligned(np.int32, 9)
    assert scheduler.submit(tokens) == 0
    assert scheduler.cached_tokens(tokens) == 0
    size = CONFIG.max_num_batched_tokens
    with pytest.raises(StepError, match="token_ids must be C-contiguous, aligned and writable"):
        pykv.StepBuffers(CONFIG, arrays={"token_ids": misaligned(np.int64, size)})
    scheduler, plan = started()
    with pytest.raises(StepError, match=r"sampled is int64: needed is an array of int64 .*aligned"):
        scheduler.apply(plan, misaligned(np.int64, 1), OK)


def test_numbers_in_another_byte_order_are_refused_by_name() -> None:
    scheduler, plan = started()
    foreign = np.array([1]).astype(np.dtype(np.int64).newbyteorder())
    with pytest.raises(StepError, match=r"sampled is .i8: .*bytes are in another order"):
        scheduler.apply(plan, foreign, OK)
    scheduler.apply(plan, np.array([1]), OK)
    rows, starts = np.array([0], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(StepError, match=r"tokens is .i8: .*bytes are in another order"):
        scheduler.propose(rows, starts, foreign)


def test_prompts_samples_and_drafts_take_the_same_token_ids() -> None:
    highest = 2**31 - 1
    scheduler, plan = started()
    allowed = "a token id from 0 to 2147483647"
    with pytest.raises(StepError, match=rf"sampled\[0\] is 2147483648: allowed is {allowed}"):
        scheduler.apply(plan, np.array([highest + 1]), OK)
    scheduler.apply(plan, np.array([highest]), OK)
    rows, starts = np.array([0], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(StepError, match=rf"tokens\[0\] is 2147483648: allowed is {allowed}"):
        scheduler.propose(rows, starts, np.array([highest + 1]))
    with pytest.raises(InvalidRequestError, match="prompt holds 2147483648: allowed are token ids from 0"):
        scheduler.submit([highest + 1])
    scheduler.submit([highest])


@pytest.mark.parametrize("media", [[(5, b"x")], [(0, b"")], [(0, b"x" * 65)], [(1, b"x"), (1, b"y")]])
def test_content_keys_refuse_the_media_that_a_request_may_not_have(media: list[tuple[int, bytes]]) -> None:
    with pytest.raises(InvalidRequestError) as of_request:
        pykv.Scheduler(CONFIG).submit([1, 2, 3, 4, 5], media=media)
    with pytest.raises(InvalidRequestError) as of_keys:
        content_keys([1, 2, 3, 4, 5], block_size=4, media=media)
    assert (str(of_keys.value), of_keys.value.field) == (str(of_request.value), "media")


def test_a_limit_that_is_reached_is_named() -> None:
    config = pykv.SchedulerConfig(
        num_blocks=32,
        block_size=4,
        max_queued_requests=1,
        max_queued_tokens=9,
        max_pinned_blocks=3,
        max_pinned_blocks_per_tenant=1,
    )
    scheduler, step = pykv.Scheduler(config), pykv.StepBuffers(config)
    scheduler.submit(range(9), max_tokens=1)
    with pytest.raises(QueueFullError, match=r"allowed are 1 \(max_queued_requests\)"):
        scheduler.submit([1])
    plan = scheduler.plan(step)
    assert plan is not None
    scheduler.apply(plan, np.array([1]), OK)
    with pytest.raises(PinQuotaError, match=r"allowed are 1 \(max_pinned_blocks_per_tenant\)"):
        scheduler.pin(range(9))


def test_an_empty_session_is_refused() -> None:
    scheduler = pykv.Scheduler(CONFIG)
    for empty in ("", b""):
        with pytest.raises(InvalidRequestError, match="allowed is bytes or text that is not empty"):
            scheduler.submit([1], session=empty)
        with pytest.raises(InvalidRequestError, match="allowed is bytes or text that is not empty"):
            scheduler.end_session(empty)


def test_options_take_the_integers_of_numpy() -> None:
    config = pykv.SchedulerConfig(num_blocks=np.int64(32), block_size=np.int32(4), groups=(None, np.int64(6)))
    assert config == pykv.SchedulerConfig(num_blocks=32, block_size=4, groups=(None, 6))
    assert type(config.num_blocks) is int
    pykv.Scheduler(config).submit([1, 2], media=[(np.int64(1), b"cat")])
