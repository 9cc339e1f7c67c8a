"""A policy of eviction written in Python: an idea that is tried before it is Rust."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pykv.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["POLICIES", "PRODUCTION_POLICIES", "BlockUse", "EvictionPolicy", "ranking_of"]

PRODUCTION_POLICIES = ("lru", "segmented_lru")
"""Those of the scheduler, by the names of `SchedulerConfig.eviction`."""

POLICIES = (*PRODUCTION_POLICIES, "session_end", "session_idle", "dead", "opt")
"""Those that are built in.

`lru` is the production tree's: the leaf that was used least recently; `segmented_lru` is too: first the leaves that no
hit has found. `session_end` is told when sessions end,
`session_idle` takes those for over that were idle for eight of their mean gaps, and `dead` is told which blocks nobody
uses again: these go first, the rest as in `lru`. `opt` evicts what is used again last.
"""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """One request that has used the blocks of its prompt.

    Attributes:
        request: its place in the trace, from 0 on.
        blocks: [num_blocks] int64, their numbers in order, as far as they fit the cache; the same number is the same
            content after the same beginning.
        num_found: how many of them were cached before.
    """

    request: int
    blocks: NDArray[np.int64]
    num_found: int


class EvictionPolicy(Protocol):
    """Decides which cached block makes room: the leaf of the lowest rank that nobody uses."""

    def rank(self, use: BlockUse) -> ArrayLike:
        """Gives the blocks of a use new ranks, which stay until they are used again.

        Returns:
            A number for each block in order, or one for all of them; no NaN. Among equals the block that was used
            least recently goes first.
        """


def ranking_of(policy: EvictionPolicy) -> Callable[[int, bytes, int], NDArray[np.float64]]:
    """The policy as the compiled core calls it."""

    def rank(request: int, blocks: bytes, num_found: int) -> NDArray[np.float64]:
        use = BlockUse(request, np.frombuffer(blocks, np.uint32).astype(np.int64), num_found)
        given = policy.rank(use)  # its own errors stay its own: their traceback shows where
        try:
            ranks = np.asarray(given, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rank of request {request} gives no numbers: {error}") from error
        if ranks.shape not in ((), use.blocks.shape):
            raise ConfigError(
                f"rank of request {request} does not fit {len(use.blocks)} blocks: its shape is {ranks.shape}"
            )
        if np.isnan(ranks).any():
            raise ConfigError(f"rank of request {request} is NaN: allowed are numbers")
        return np.ascontiguousarray(np.broadcast_to(ranks, use.blocks.shape))

    return rank
