"""KV events: which blocks can be found, told to routers and tiers outside, by keys that every process computes alike.

>>> from pykv.events import content_keys
>>> keys = content_keys(range(9), block_size=4, scope=b"model")
>>> keys.shape, keys.dtype
((3, 32), dtype('uint8'))
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv import _core
from pykv.errors import ConfigError
from pykv.field_checks import as_bytes, as_integer
from pykv.retention import checked_media
from pykv.token_array import as_token_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KvEventKind", "KvEvents", "content_keys"]


class KvEventKind(enum.IntEnum):
    """What has happened to a block."""

    STORED = 0
    """It was computed and can be found."""
    REMOVED = 1
    """It cannot be found any more."""
    CLEARED = 2
    """No block can be found any more: the cache was reset."""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Events in their order, an entry each; the arrays are read-only.

    Who holds the set of keys that can be found applies them one by one: adds what is stored, takes out what is removed,
    empties it when all are cleared. A gap between `sequence` and the number expected next means that events were
    dropped: take a snapshot, replace the set by its keys, and go on with the events from its `sequence` on.

    Attributes:
        sequence: the number of the first event; the others follow without a gap. Of a snapshot: that of the next event.
        num_dropped: events that were dropped in all since the scheduler was made, the oldest first, because nobody had
            taken them in time.
        kinds: uint8 [num_events], a `KvEventKind` each.
        keys: uint8 [num_events, 32]; the block's content key, zeros where all were cleared.
        parent_keys: uint8 [num_events, 32]; the key that a stored block follows: of the block before it, or of its
            scope where it is the first. Zeros for other kinds.
        is_first: bool [num_events]; whether a stored block is the first of its sequence.
        token_ids: int32 [num_events, block_size]; the tokens of a stored block, zeros for other kinds.
    """

    sequence: int
    num_dropped: int
    kinds: NDArray[np.uint8]
    keys: NDArray[np.uint8]
    parent_keys: NDArray[np.uint8]
    is_first: NDArray[np.bool_]
    token_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.kinds)


def events_of(native: tuple[int, int, bytes, bytes, bytes, bytes, bytes], block_size: int) -> KvEvents:
    """Returns what the compiled core gives as arrays over the same bytes."""
    sequence, num_dropped, kinds, keys, parents, is_first, tokens = native
    return KvEvents(
        sequence,
        num_dropped,
        np.frombuffer(kinds, np.uint8),
        np.frombuffer(keys, np.uint8).reshape(-1, 32),
        np.frombuffer(parents, np.uint8).reshape(-1, 32),
        np.frombuffer(is_first, np.bool_),
        np.frombuffer(tokens, np.int32).reshape(-1, block_size),
    )


def content_keys(
    tokens: NDArray[np.int32] | Sequence[int],
    *,
    block_size: int,
    scope: bytes = b"",
    media: Sequence[tuple[int, bytes]] = (),
) -> NDArray[np.uint8]:
    """Returns the key of a scope and those of a prompt's full blocks in it, the same in every process.

    A key is the BLAKE3 hash of its parent's key, the block's tokens and the media that begin in it; the scope's
    hashes the block size and the scope. The framing is that of rust/core/src/prefix/content_key.rs.

    Args:
        tokens: the prompt's token ids.
        block_size: tokens a block.
        scope: as given to `Scheduler.submit`.
        media: as given to `Scheduler.submit`.

    Returns:
        uint8 [1 + num_full_blocks, 32].

    Raises:
        InvalidRequestError: `tokens` are no token ids, `scope` is not bytes, or `media` are no offsets with hashes.
        ConfigError: there is no such block size.
    """
    size = as_integer("block_size", block_size, 1, 65_536, ConfigError)
    array = as_token_array(tokens, "tokens")
    return np.frombuffer(
        _core.content_keys(array, size, as_bytes("scope", scope), checked_media(media)), np.uint8
    ).reshape(-1, 32)
