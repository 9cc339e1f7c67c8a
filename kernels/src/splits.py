"""Into how many parts a decode cuts each sequence: decided on the host from sizes alone, never from lengths."""

from __future__ import annotations

from pykv.kernels.target import Target

__all__ = ["choose_num_splits"]

_MOST_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 2
_REDUCE_ELEMENTS = 1 << 14  # of one (token, head): what the reduce kernel holds at once


def choose_num_splits(target: Target, num_programs: int, num_tiles: int, head_dim: int) -> int:
    """The fewest splits that keep the device nearly as busy as the best number would.

    Args:
        num_programs: programs without splitting, that is, sequences times KV heads.
        num_tiles: tiles of the longest sequence that the tables can hold (or of the window).
        head_dim: the padded head size of the values.
    """
    places = target.num_processors * _PROGRAMS_PER_PROCESSOR
    limit = max(1, min(_MOST_SPLITS, num_tiles, _REDUCE_ELEMENTS // head_dim))
    busy = [_busy(num_programs * splits / places) for splits in range(1, limit + 1)]
    enough = 0.85 * max(busy)
    return next(index + 1 for index, share in enumerate(busy) if share >= enough)


def _busy(waves: float) -> float:
    """The share of the device that works, when its places are filled `waves` times."""
    return waves / -(-waves // 1)
