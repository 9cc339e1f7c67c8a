"""Blocks and the prefix cache without a scheduler: for engines that decide for themselves what runs.

    >>> from pykv.blocks import BlockPool, PrefixCache
    >>> cache = PrefixCache(BlockPool(num_blocks=64, block_size=4))
    >>> prompt = [7, 8, 9, 10, 11, 12]
    >>> table, num_cached_tokens = cache.share(prompt)
    >>> cache.extend(table, 2)
    >>> # ... the model writes the K and V of the prompt into the table's blocks ...
    >>> cache.publish(table, prompt, num_tokens=6)
    False
    >>> other, num_cached_tokens = cache.share(prompt)
    >>> num_cached_tokens, other.block_ids() == table.block_ids()[:1]
    (4, True)

The module needs numpy only. All objects may be used from any thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_bytes, as_integer, instance_of, refuse
from pykv.token_array import as_token_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockCounts", "BlockPool", "BlockTable", "PrefixCache"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state: free + cached + active = total; the null block is not counted."""

    free: int
    cached: int
    active: int
    total: int


class BlockPool:
    """A pool of blocks of one size. Block 0 is the null block: it is never handed out.

    Args:
        num_blocks: blocks of the pool, the null block included, 2 to 2**30.
        block_size: tokens a block, 1 to 65,536.

    Raises:
        ConfigError: one of them is out of its range.
        MemoryError: the system does not give what the blocks' books need.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for field, value, low, high in (
            ("num_blocks", num_blocks, 2, 2**30),
            ("block_size", block_size, 1, 65_536),
        ):
            as_integer(field, value, low, high, ConfigError)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_cached = False
        self._native = _core.BlockPool(num_blocks, block_size)

    def table(self) -> BlockTable:
        """Returns a table of no blocks."""
        return BlockTable(self._native.table(), self)

    def references(self, block_id: int) -> int:
        """Returns how many tables hold a block.

        Raises:
            InvalidRequestError: the pool has no such block.
        """
        block_id = as_integer("block_id", block_id, 0, _INT32_MAX)
        return self._native.references(block_id)

    def count(self) -> BlockCounts:
        """Counts the states block by block."""
        return BlockCounts(*self._native.count())


class BlockTable:
    """One sequence's blocks, in order. Dropping the table gives them back; so does `truncate(0)`."""

    def __init__(self, native: _core.BlockTable, pool: BlockPool) -> None:
        self._native = native
        self.pool = pool

    def __len__(self) -> int:
        return len(self._native)

    def block_ids(self) -> list[int]:
        """Returns the blocks, in order."""
        return self._native.block_ids()

    def extend(self, count: int) -> None:
        """Takes free blocks. `PrefixCache.extend` also evicts cached ones.

        Raises:
            OutOfBlocksError: fewer are free; none was taken.
            InvalidRequestError: `count` is no integer of at least 0.
        """
        count = as_integer("count", count, 0, _INT32_MAX)
        self._native.extend(count)

    def fork(self) -> BlockTable:
        """Returns a second table over the same blocks; `copy_on_write` comes before one of both writes."""
        return BlockTable(self._native.fork(), self.pool)

    def truncate(self, length: int) -> None:
        """Gives back the blocks from `length` on.

        Raises:
            InvalidRequestError: published blocks would be cut off; allowed are all of them or none.
        """
        length = as_integer("length", length, 0, _INT32_MAX)
        self._native.truncate(length)

    def is_writable(self, index: int) -> bool:
        """Returns whether nobody else holds or can find the block at `index`.

        Raises:
            InvalidRequestError: the table has no such block.
        """
        index = as_integer("index", index, 0, _INT32_MAX)
        return self._native.is_writable(index)

    def copy_on_write(self, index: int) -> tuple[int, int]:
        """Puts a block of its own in the place of a shared one. `PrefixCache.copy_on_write` also evicts a cached one.

        A block that `is_writable` is replaced, too, and takes a free one for no use: ask first.

        Returns:
            (source, target): the blocks to copy, before the target is written.

        Raises:
            InvalidRequestError: the table has no such block, or it is published.
            OutOfBlocksError: no block is free.
        """
        index = as_integer("index", index, 0, _INT32_MAX)
        return self._native.copy_on_write(index)


class PrefixCache:
    """Published blocks that later sequences find again, over a pool that nobody else publishes in.

    A hit has the same tokens in the same scope from position 0 on, by comparison. Blocks that nobody uses make room
    when others are needed, leaves first. A hit is a whole number of blocks: the first tokens of a block are reused by a
    `Scheduler` only (`partial_block_reuse`).

    Args:
        pool: the pool whose blocks are cached.
        eviction: "lru": what was used least recently makes room first; "segmented_lru": before it, what no hit has
            found yet.

    Raises:
        ConfigError: another cache publishes in the pool already, or there is no such policy.
        MemoryError: the system does not give what the blocks' books need.
    """

    def __init__(self, pool: BlockPool, *, eviction: str = "lru") -> None:
        instance_of("pool", pool, BlockPool, ConfigError)
        instance_of("eviction", eviction, str, ConfigError)
        if pool.is_cached:
            raise ConfigError("pool has a prefix cache already: allowed is one")
        self._native = _core.PrefixCache(pool._native, secrets.randbits(64), eviction)
        pool.is_cached = True
        self.pool = pool

    def probe(self, tokens: NDArray[np.int32] | Sequence[int], *, scope: bytes = b"") -> int:
        """Returns how many of the first tokens are cached. Changes nothing.

        Raises:
            InvalidRequestError: `tokens` are no token ids, or `scope` is not bytes.
        """
        hits = self._native.probe(
            as_token_array(tokens, "tokens"), as_bytes("scope", scope), self.pool.num_blocks
        )
        return hits * self.pool.block_size

    def share(
        self, tokens: NDArray[np.int32] | Sequence[int], *, scope: bytes = b"", max_tokens: int | None = None
    ) -> tuple[BlockTable, int]:
        """Starts a table with the cached blocks that `tokens` begin with, and pins them in the same step.

        Args:
            tokens: the sequence's token ids.
            scope: what may share; the same bytes in every call for a sequence.
            max_tokens: the most tokens to share; None: all but the last, whose logits are wanted.

        Returns:
            The table, and how many tokens its blocks hold.

        Raises:
            InvalidRequestError: `tokens` are no token ids, or another argument is not of its type or range.
        """
        array = as_token_array(tokens, "tokens")
        limit = len(array) - 1 if max_tokens is None else max_tokens
        limit = as_integer("max_tokens", limit, 0, _INT32_MAX)
        table, hits = self._native.share(array, as_bytes("scope", scope), limit // self.pool.block_size)
        return BlockTable(table, self.pool), hits * self.pool.block_size

    def extend(self, table: BlockTable, count: int) -> None:
        """Takes blocks for a table, evicting cached ones where too few are free.

        Raises:
            InvalidRequestError: the table is another pool's, or `count` is no integer of at least 0.
            OutOfBlocksError: not even so there are enough; none was taken.
        """
        self._check_own(table)
        count = as_integer("count", count, 0, _INT32_MAX)
        self._native.extend(table._native, count)

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int]:
        """Puts a block of its own in the place of a shared one, evicting a cached one where none is free.

        A block that `BlockTable.is_writable` is replaced, too, and takes another one for no use: ask first.

        Returns:
            (source, target): the blocks to copy, before the target is written.

        Raises:
            InvalidRequestError: the table has no such block, it is published, or the table is another pool's.
            OutOfBlocksError: no block is free and none can be evicted.
        """
        self._check_own(table)
        index = as_integer("index", index, 0, _INT32_MAX)
        return self._native.copy_on_write(table._native, index)

    def publish(
        self,
        table: BlockTable,
        tokens: NDArray[np.int32] | Sequence[int],
        *,
        num_tokens: int,
        scope: bytes = b"",
    ) -> bool:
        """Makes a table's full blocks findable, from the first on: call it when their K and V were computed.

        Where an equal block is cached already, the table goes over to that one and gives its own back. A fork that
        holds the table's own block keeps that from happening, since what both hold behind it would then hang below a
        block that the fork does not hold: publishing stops there, and goes on in a call after the fork has gone. Until
        then nothing behind that block is found (`probe` tells). Forks of blocks that nobody else has cached are no
        obstacle: the first to publish them does so for all.

        Nothing is published of a table that has held blocks over a `reset`, until it holds none.

        Args:
            table: the sequence's blocks; published ones must not be written any more.
            tokens: the sequence's token ids.
            num_tokens: how many of them are computed.
            scope: as given to `share`.

        Returns:
            Whether the table changed, because it went over to a cached block.

        Raises:
            InvalidRequestError: `num_tokens` passes the tokens or the blocks, or the table is another pool's.
        """
        self._check_own(table)
        num_tokens = as_integer("num_tokens", num_tokens, 0, _INT32_MAX)
        array = as_token_array(tokens, "tokens")
        return self._native.publish(table._native, array, as_bytes("scope", scope), num_tokens)

    def reset(self) -> None:
        """Makes nothing of what was computed so far findable any more: idle blocks are free now, used ones later.

        Takes time that grows with the cached blocks, about 0.1 s for a million.
        """
        self._native.reset()

    def count(self) -> BlockCounts:
        """Counts the states, in constant time."""
        return BlockCounts(*self._native.count()[:4])

    @property
    def num_evictions(self) -> int:
        """How often a cached block made room."""
        return self._native.count()[4]

    def check(self) -> None:
        """Compares pool, tree and eviction order with each other, block by block.

        Raises:
            PoisonedError: an invariant of docs/invariants.md does not hold.
        """
        self._native.check()

    def _check_own(self, table: BlockTable) -> None:
        if not isinstance(table, BlockTable) or table.pool is not self.pool:
            refuse("table", table, "a table of this cache's pool")
