"""KV events with the short block hashes, and in the runs, of vLLM's events."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pykv.events import KvEventKind, KvEvents

__all__ = ["Cleared", "Removed", "Run", "Stored", "runs_of"]


@dataclass(slots=True)
class Stored:
    """Blocks that were stored, each the child of the one before.

    Attributes:
        hashes: the first 8 bytes of the blocks' keys, as unsigned numbers.
        parent: of the first of them; None where it is the first of its sequence.
        token_ids: of each block.
    """

    parent: int | None
    hashes: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Removed:
    """Blocks that cannot be found any more."""

    hashes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cleared:
    """No block can be found any more."""


Run = Stored | Removed | Cleared


def runs_of(events: KvEvents) -> Iterator[Run]:
    """The events in their order, neighbours of one kind that belong together in one."""
    hashes, parents = _hashes(events.keys), _hashes(events.parent_keys)
    is_first, token_ids = events.is_first.tolist(), events.token_ids.tolist()
    run: Run | None = None
    for place, kind in enumerate(events.kinds.tolist()):
        parent = None if is_first[place] else parents[place]
        continues = (kind == KvEventKind.STORED and isinstance(run, Stored) and parent == run.hashes[-1]) or (
            kind == KvEventKind.REMOVED and isinstance(run, Removed)
        )
        if not continues:
            if run is not None:
                yield run
            run = _new_run(kind, parent)
        if isinstance(run, Stored):
            run.token_ids.append(token_ids[place])
        if isinstance(run, (Stored, Removed)):
            run.hashes.append(hashes[place])
    if run is not None:
        yield run


def _new_run(kind: int, parent: int | None) -> Run:
    if kind == KvEventKind.STORED:
        return Stored(parent)
    return Removed() if kind == KvEventKind.REMOVED else Cleared()


def _hashes(keys: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> list[int]:
    words: list[int] = np.ascontiguousarray(keys[:, :8]).view(">u8").reshape(-1).tolist()
    return words
