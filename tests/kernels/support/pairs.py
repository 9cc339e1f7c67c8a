"""Few settings in which every value of each factor meets every value of each other one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["covering"]

Pair = tuple[int, int, int, int]


def covering(factors: Mapping[tuple[str, ...], tuple[tuple[Any, ...], ...]]) -> Iterator[dict[str, Any]]:
    """Settings, by name.

    Args:
        factors: the names that vary together, and the values that they have together.
    """
    choices = list(factors.values())
    sizes = [len(values) for values in choices]
    missing = {
        (one, first, other, second)
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for first in range(sizes[one])
        for second in range(sizes[other])
    }
    while missing:
        row = _row(min(missing), missing, sizes)
        missing -= set(_pairs(row))
        yield {
            name: value
            for names, number, options in zip(factors, row, choices, strict=True)
            for name, value in zip(names, options[number], strict=True)
        }


def _row(begin: Pair, missing: set[Pair], sizes: list[int]) -> list[int]:
    """A setting with a pair that is missing, and, factor by factor, the value that brings the most others."""
    chosen = {begin[0]: begin[1], begin[2]: begin[3]}
    for factor, size in enumerate(sizes):
        if factor not in chosen:
            brought = [len(_new_pairs(chosen, factor, value) & missing) for value in range(size)]
            start = len(missing) % size  # where all bring as many, the values take turns
            chosen[factor] = max(
                range(size),
                key=lambda value: (brought[value], -((value - start) % size)),
            )
    return [chosen[factor] for factor in range(len(sizes))]


def _new_pairs(chosen: dict[int, int], factor: int, value: int) -> set[Pair]:
    return {
        (other, number, factor, value) if other < factor else (factor, value, other, number)
        for other, number in chosen.items()
    }


def _pairs(row: list[int]) -> Iterator[Pair]:
    for (one, first), (other, second) in itertools.combinations(enumerate(row), 2):
        yield one, first, other, second
