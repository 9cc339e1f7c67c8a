"""The pool and the prefix cache without a scheduler, through their Python face."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pykv import _core
from pykv.blocks import BlockPool, BlockTable, PrefixCache
from pykv.errors import ConfigError, InvalidRequestError, OutOfBlocksError, PoisonedError

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 16) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks, BLOCK_SIZE))


def run(cache: PrefixCache, prompt: list[int], scope: bytes = b"") -> int:
    table, cached = cache.share(prompt, scope=scope)
    cache.extend(table, -(-len(prompt) // BLOCK_SIZE) - len(table))
    cache.publish(table, prompt, num_tokens=len(prompt), scope=scope)
    cache.check()
    return cached


def test_a_prompt_run_again_shares_all_but_its_last_token() -> None:
    cache = make_cache()
    prompt = list(range(8))
    assert [run(cache, prompt), run(cache, prompt), run(cache, [*prompt, 9])] == [0, 4, 8]
    assert cache.probe(prompt) == 8


def test_tokens_that_agree_in_their_low_byte_share_nothing() -> None:
    cache = make_cache(32)
    assert [run(cache, [token] * 8) for token in (65, 321, 65_601, 65 + 2**24, 0)] == [0] * 5


def test_scopes_share_nothing() -> None:
    cache = make_cache(32)
    prompt = list(range(9))
    assert [run(cache, prompt, scope) for scope in (b"a", b"b", b"a", b"")] == [0, 0, 8, 0]


def test_a_dropped_table_gives_its_blocks_back() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    table = pool.table()
    table.extend(3)
    fork = table.fork()
    assert pool.references(table.block_ids()[0]) == 2
    del table
    gc.collect()
    assert pool.count().active == 3
    fork.truncate(0)
    assert pool.count().free == 7


def test_a_forked_block_is_copied_before_it_is_written() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    table = pool.table()
    table.extend(2)
    fork = table.fork()
    assert not fork.is_writable(1)
    source, target = fork.copy_on_write(1)
    assert (source, target) == (table.block_ids()[1], fork.block_ids()[1])
    assert fork.is_writable(1)
    assert table.is_writable(1)


def test_cached_blocks_make_room_and_used_ones_do_not() -> None:
    cache = make_cache(5)
    run(cache, list(range(8)))
    table = cache.pool.table()
    with pytest.raises(OutOfBlocksError, match="5 blocks are needed, 4 are available"):
        cache.extend(table, 5)
    with pytest.raises(OutOfBlocksError, match="3 blocks are needed, 2 are available"):
        table.extend(3)
    cache.extend(table, 3)
    assert cache.num_evictions == 1
    assert cache.probe(list(range(8))) == 4


def test_a_cached_block_makes_room_for_a_copy() -> None:
    cache = make_cache(3)
    run(cache, list(range(5)))
    table = cache.pool.table()
    table.extend(1)
    fork = table.fork()
    with pytest.raises(OutOfBlocksError, match="1 blocks are needed, 0 are available"):
        fork.copy_on_write(0)
    source, target = cache.copy_on_write(fork, 0)
    assert (table.block_ids(), fork.block_ids()) == ([source], [target])
    assert (cache.num_evictions, cache.count().active) == (1, 2)
    with pytest.raises(OutOfBlocksError, match="1 blocks are needed, 0 are available"):
        cache.copy_on_write(table.fork(), 0)
    cache.publish(table, list(range(4)), num_tokens=4)
    with pytest.raises(InvalidRequestError, match="index is 0: allowed is at least the 1 published blocks"):
        cache.copy_on_write(table, 0)
    with pytest.raises(InvalidRequestError, match="index is 1: allowed is below the table's 1 blocks"):
        cache.copy_on_write(table, 1)
    cache.check()


def test_a_reset_is_true_to_its_word_while_blocks_are_used() -> None:
    cache = make_cache()
    prompt = list(range(9))
    run(cache, prompt)
    table, cached = cache.share(prompt)
    assert cached == 8
    cache.reset()
    assert cache.probe(prompt) == 0
    assert cache.count().active == 2
    cache.publish(table, prompt, num_tokens=8)
    assert cache.probe(prompt) == 0
    cache.check()


@pytest.mark.parametrize(
    ("field", "arguments"), [("num_blocks", (1, 4)), ("block_size", (8, 0)), ("num_blocks", (True, 4))]
)
def test_a_pool_that_cannot_be_is_refused(field: str, arguments: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"{field} is"):
        BlockPool(*arguments)


@pytest.mark.parametrize("way", ["taken", "shared", "forked", "taken by the cache"])
def test_a_table_with_blocks_of_before_a_reset_publishes_nothing_until_it_is_empty(way: str) -> None:
    cache = make_cache()
    prompt = list(range(9))
    run(cache, prompt)
    table = cache.pool.table()
    if way == "shared":
        table, _ = cache.share(prompt)
    elif way == "taken by the cache":
        cache.extend(table, 2)
    else:
        table.extend(2)
    cache.reset()
    table = table.fork() if way == "forked" else table
    table.extend(1)
    cache.publish(table, prompt, num_tokens=8)
    assert cache.probe(prompt) == 0
    table.truncate(0)
    table.extend(2)
    cache.publish(table, prompt, num_tokens=8)
    assert cache.probe(prompt) == 8
    cache.check()


def published_table(cache: PrefixCache) -> BlockTable:
    table, _ = cache.share([1, 2, 3, 4, 5])
    cache.extend(table, 2)
    cache.publish(table, [1, 2, 3, 4, 5], num_tokens=5)
    return table


def test_what_a_table_does_not_have_is_refused_by_name() -> None:
    cache = make_cache()
    table, _ = cache.share([1, 2, 3])
    for call, field in (
        (lambda: table.copy_on_write(0), "index"),
        (lambda: table.is_writable(3), "index"),
        (lambda: published_table(make_cache()).copy_on_write(0), "index"),
        (lambda: table.extend(-1), "count"),
        (lambda: cache.pool.references(99), "block_id"),
        (lambda: cache.publish(table, [1] * 4, num_tokens=4), "num_tokens"),
        (lambda: cache.publish(table, [1] * 4, num_tokens=5), "num_tokens"),
        (lambda: cache.share([]), "tokens"),
        (lambda: cache.probe([-1]), "tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{field} (is|holds)"):
            call()
    cache.check()


def test_a_table_of_another_pool_is_refused_before_anything_changes() -> None:
    cache, stranger = make_cache(), BlockPool(16, BLOCK_SIZE).table()
    stranger.extend(2)
    for call in (
        lambda: cache.publish(stranger, list(range(8)), num_tokens=8),
        lambda: cache.extend(stranger, 1),
        lambda: cache.copy_on_write(stranger, 0),
        lambda: cache.extend(None, 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            InvalidRequestError, match=r"table is .*: allowed is a table of this cache's pool"
        ):
            call()
    assert cache.probe(list(range(8))) == 0
    cache.check()


def test_a_pool_has_one_prefix_cache() -> None:
    pool = BlockPool(16, BLOCK_SIZE)
    PrefixCache(pool)
    with pytest.raises(ConfigError, match="pool has a prefix cache already"):
        PrefixCache(pool)


def test_no_tokens_are_refused_by_the_field_that_was_given() -> None:
    cache = PrefixCache(BlockPool(8, 4))
    for tokens in ([], np.array([], np.int32)):
        for call in (cache.share, cache.probe):
            with pytest.raises(InvalidRequestError, match="tokens is empty") as caught:
                call(tokens)
            assert caught.value.field == "tokens"


def test_a_panic_in_a_table_becomes_an_exception_and_poisons_it_alone() -> None:
    pool = BlockPool(8, 4)
    cache = PrefixCache(pool)
    table = pool.table()
    with pytest.raises(PoisonedError, match="asked to panic"):
        table._native._panic()
    calls = (lambda: table.extend(1), table.block_ids, table.fork, lambda: cache.extend(table, 1))
    for call in calls:
        with pytest.raises(PoisonedError, match="refused after an earlier failure"):
            call()
    cache.extend(pool.table(), 1)


def test_a_panic_in_a_function_becomes_an_exception() -> None:
    with pytest.raises(PoisonedError, match="asked to panic"):
        _core._panic()


def test_publishing_waits_for_a_fork_that_holds_a_block_which_is_cached_already() -> None:
    cache = make_cache()
    prompt = list(range(12))
    table = cache.share(prompt)[0]
    cache.extend(table, 3)
    fork = table.fork()
    own = table.block_ids()
    assert run(cache, prompt[:4]) == 0
    assert not cache.publish(table, prompt, num_tokens=12)
    assert (table.block_ids(), cache.probe(prompt)) == (own, 4)
    del fork
    gc.collect()
    assert cache.publish(table, prompt, num_tokens=12)
    assert (table.block_ids()[1:], cache.probe(prompt)) == (own[1:], 12)
    cache.check()


def test_forks_of_blocks_that_nobody_else_has_cached_publish_them_for_all() -> None:
    cache = make_cache()
    prompt = list(range(8))
    table = cache.share(prompt)[0]
    cache.extend(table, 2)
    fork = table.fork()
    assert not cache.publish(fork, prompt, num_tokens=8)
    assert cache.probe(prompt) == 8
    assert not cache.publish(table, prompt, num_tokens=8)
    cache.check()


def test_published_blocks_are_not_cut_off() -> None:
    cache = make_cache()
    table, _ = cache.share(list(range(9)))
    cache.extend(table, 3)
    cache.publish(table, list(range(9)), num_tokens=9)
    table.truncate(2)
    with pytest.raises(InvalidRequestError, match="2 published blocks"):
        table.truncate(1)
    table.truncate(0)
    assert cache.count().cached == 2


def test_tables_may_be_dropped_by_any_thread() -> None:
    cache = make_cache(64)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_ in range(300):
                prompt = [seed % 2, *range(round_ % 7, round_ % 7 + 11)]
                run(cache, prompt)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.count().active == 0
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Random operations against a model that keeps every published prefix in a set and every table as a list."""

    tables = Bundle("tables")

    @initialize()
    def start(self) -> None:
        self.cache = make_cache(12)
        self.live: list[BlockTable] = []
        self.ever_published: set[tuple[int, ...]] = set()

    @rule(target=tables, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start_sequence(self, prompt: list[int]) -> tuple[BlockTable, list[int]]:
        table, cached = self.cache.share(prompt)
        assert cached <= len(prompt) - 1
        assert all(tuple(prompt[: end + 4]) in self.ever_published for end in range(0, cached, 4))
        missing = -(-len(prompt) // BLOCK_SIZE) - len(table)
        counts = self.cache.count()
        if missing > counts.free + counts.cached:
            with pytest.raises(OutOfBlocksError):
                self.cache.extend(table, missing)
            table.truncate(0)
        else:
            self.cache.extend(table, missing)
        self.live.append(table)
        return table, prompt

    @rule(sequence=tables)
    def publish(self, sequence: tuple[BlockTable, list[int]]) -> None:
        table, prompt = sequence
        num_tokens = min(len(prompt), len(table) * BLOCK_SIZE)
        self.cache.publish(table, prompt, num_tokens=num_tokens)
        self.ever_published |= {tuple(prompt[:end]) for end in range(4, num_tokens + 1, 4)}

    @rule(sequence=consumes(tables))
    def end_sequence(self, sequence: tuple[BlockTable, list[int]]) -> None:
        sequence[0].truncate(0)
        self.live.remove(sequence[0])

    @rule(target=tables, sequence=tables)
    def fork(self, sequence: tuple[BlockTable, list[int]]) -> tuple[BlockTable, list[int]]:
        fork = sequence[0].fork()
        self.live.append(fork)
        return fork, sequence[1]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.ever_published.clear()

    @invariant()
    def accounts_agree(self) -> None:
        self.cache.check()
        held = {block for table in self.live for block in table.block_ids()}
        counts = self.cache.count()
        assert counts == self.cache.pool.count()
        assert counts.active == len(held)
        assert counts.free + counts.cached + counts.active == counts.total == 11
        assert 0 not in held


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
