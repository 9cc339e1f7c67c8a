"""Many threads on one pool, one cache, one scheduler: nothing is lost, handed out twice, or waited for for ever."""

from __future__ import annotations

import gc
import logging
import queue
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pykv.blocks import BlockPool, BlockTable, PrefixCache
from pykv.errors import InvalidRequestError, OutOfBlocksError
from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers


def run_threads(*works: Callable[[], None]) -> None:
    """Runs each in a thread of its own; the first error of any is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_tables_of_many_threads_never_hold_the_same_block() -> None:
    pool = BlockPool(65, 4)
    owners: dict[int, int] = {}
    handed_over: queue.SimpleQueue[BlockTable] = queue.SimpleQueue()

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(400):
            table = pool.table()
            try:
                table.extend(chance.randint(1, 12))
            except OutOfBlocksError:
                assert len(table) == 0
                continue
            blocks = table.block_ids()
            assert 0 not in blocks
            for block in blocks:
                assert owners.setdefault(block, number) == number, f"block {block} has two owners"
            assert all(table.is_writable(place) for place in range(len(table)))
            for block in blocks:
                del owners[block]
            fork = table.fork()
            assert not fork.is_writable(0)
            if chance.random() < 0.5:
                try:
                    source, target = fork.copy_on_write(0)
                    assert (source, fork.block_ids()[0]) == (blocks[0], target)
                except OutOfBlocksError:
                    pass
            table.truncate(chance.randint(0, len(table)))
            # Whoever takes it drops it.
            handed_over.put(fork)
            if chance.random() < 0.7:
                handed_over.get()

    run_threads(*(lambda number=number: work(number) for number in range(8)))
    while not handed_over.empty():
        handed_over.get()
    gc.collect()
    counts = pool.count()
    assert (counts.free, counts.cached, counts.active) == (counts.total, 0, 0)
    everything = pool.table()
    everything.extend(counts.total)
    assert sorted(everything.block_ids()) == list(range(1, 65))


def test_a_cache_under_pressure_from_many_threads_keeps_its_accounts() -> None:
    cache = PrefixCache(BlockPool(41, 4))

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(300):
            prompt = [chance.randint(0, 1)] * 8 + [chance.randint(0, 3) for _ in range(chance.randint(1, 12))]
            table, cached = cache.share(prompt)
            assert cached % 4 == 0
            assert cached < len(prompt)
            try:
                cache.extend(table, -(-len(prompt) // 4) - len(table))
            except OutOfBlocksError:
                continue
            cache.publish(table, prompt, num_tokens=len(prompt))
            if chance.random() < 0.02:
                cache.reset()

    run_threads(*(lambda number=number: work(number) for number in range(8)))
    cache.check()
    counts = cache.count()
    assert counts.active == 0
    assert counts.free + counts.cached == counts.total
    cache.reset()
    assert cache.count().free == counts.total


def test_callbacks_errors_and_collections_meanwhile_end_in_no_deadlock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Threads hold the interpreter and want the scheduler, others the reverse; neither waits for the other."""
    config = SchedulerConfig(
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        max_queued_requests=10_000,
    )
    scheduler = Scheduler(config)
    done = threading.Event()

    def submit() -> None:
        for number in range(100):
            request = scheduler.submit([number % 5, 1, 2], max_tokens=3)
            if number % 4 == 0:
                scheduler.abort(request)

    def look() -> None:
        class Lazy:
            """Calls the scheduler when the log formats it."""

            def __str__(self) -> str:
                return str(scheduler.stats().num_requests)

        for _ in range(100):
            logging.getLogger("pykv.test").warning("%s live", Lazy())
            scheduler.check()

    def fail() -> None:
        for _ in range(100):
            with pytest.raises(InvalidRequestError) as caught:
                scheduler.submit([])
            assert "prompt is empty" in str(caught.value)

    def drop() -> None:
        for _ in range(15):
            other = Scheduler(config)
            other.submit([1, 2, 3])
            # The collector frees it, in whatever thread it runs.
            cycle: list[object] = [other, other.plan(StepBuffers(config))]
            cycle.append(cycle)
            del other, cycle
            gc.collect()

    def step() -> None:
        buffers = StepBuffers(config)
        while not done.is_set() or scheduler.stats().num_requests:
            plan = scheduler.plan(buffers)
            if plan is not None:
                count = plan.num_samples
                scheduler.apply(plan, np.full(count, 7), np.full(count, OUTCOME_OK, np.uint8))

    stepper = threading.Thread(target=step)
    stepper.start()
    try:
        run_threads(submit, submit, submit, look, fail, drop)
    finally:
        done.set()
        stepper.join()
    stats = scheduler.stats()
    assert (stats.num_requests, stats.blocks_active) == (0, 0)
    assert len(caplog.records) == 100
    scheduler.check()


def test_python_goes_on_while_a_long_call_runs() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=2**19, block_size=1, max_num_seqs=1))
    stop = threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        # Some milliseconds each, which a thread that is not let in would miss as a whole.
        most = 0
        for _ in range(50):
            before = ticks
            scheduler.check()
            most = max(most, ticks - before)
            if most > 1000:
                break
    finally:
        stop.set()
        ticker.join()
    assert most > 1000
