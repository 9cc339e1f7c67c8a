"""What an unknown name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near", "near_or_all"]

LEAST_LIKENESS = 0.5
"""Of `difflib`'s ratio; 1 is the same."""


def near(name: str, names: Iterable[str], most: int = 4) -> list[str]:
    """The names that look like `name`, the nearest first."""
    by_folded = {known.casefold(): known for known in names}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=most, cutoff=LEAST_LIKENESS)
    holding = [folded for folded in by_folded if name.casefold() in folded]
    return [by_folded[folded] for folded in dict.fromkeys([*holding, *found])][:most]


def near_or_all(name: str, names: Iterable[str]) -> str:
    """A hint for a message: the near ones, or all where none is near."""
    known = sorted(names)
    also = near(name, known)
    return f"near ones: {', '.join(also)}" if also else f"known: {', '.join(known)}"
