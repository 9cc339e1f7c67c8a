"""Checks of a request's values: each returns the value in its plain type, or refuses it by name."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import NoReturn

from pykv.errors import InvalidRequestError

_SHOWN_CHARACTERS = 80


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raises InvalidRequestError with the field's name, its value (shortened) and what is allowed."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    raise InvalidRequestError(f"{field} is {shown}; allowed: {allowed}", field)


def integer(field: str, value: object, low: int, high: int) -> int:
    """Returns `value` as an int in [low, high]; booleans and floats are refused."""
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, bool):
        refuse(field, value, allowed)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        refuse(field, value, allowed)
    if not low <= number <= high:
        refuse(field, value, allowed)
    return number


def real(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    """Returns `value` as a finite float in [low, high], or in (low, high] where `above_low`."""
    allowed = f"a number {'above' if above_low else 'of at least'} {low:g} and at most {high:g}"
    if isinstance(value, (bool, str, bytes)):
        refuse(field, value, allowed)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        refuse(field, value, allowed)
    too_low = number <= low if above_low else number < low
    if math.isnan(number) or too_low or number > high:
        refuse(field, value, allowed)
    return number


def boolean(field: str, value: object) -> bool:
    """Returns `value`, which must be True or False."""
    if not isinstance(value, bool):
        refuse(field, value, "true or false")
    return value


def strings(field: str, value: object, *, most: int, longest: int) -> tuple[str, ...]:
    """Returns a string or an iterable of strings as a tuple, at most `most` of 1 to `longest` characters."""
    allowed = f"at most {most} Unicode strings of 1 to {longest} characters"
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else _bounded(field, value, most, allowed)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= longest or not _is_unicode(item):
            refuse(field, item, allowed)
    return tuple(str(item) for item in items)


def integers(field: str, value: object, *, most: int) -> tuple[int, ...]:
    """Returns an iterable of token ids as a tuple of at most `most` ints from 0."""
    if value is None:
        return ()
    items = _bounded(field, value, most, f"at most {most} token ids")
    return tuple(integer(field, item, 0, 2**31 - 1) for item in items)


def biases(field: str, value: object, *, most: int, largest: float) -> dict[int, float]:
    """Returns a mapping from token id to a number from -largest to largest, of at most `most` entries."""
    if value is None:
        return {}
    allowed = f"a mapping of at most {most} token ids to numbers"
    if not isinstance(value, Mapping):
        refuse(field, value, allowed)
    if len(value) > most:
        refuse(field, f"{len(value)} entries", allowed)
    return {
        integer(field, key, 0, 2**31 - 1): real(field, item, -largest, largest) for key, item in value.items()
    }


def _is_unicode(text: str) -> bool:
    """Whether no lone surrogate is in the text."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _bounded(field: str, value: object, most: int, allowed: str) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        refuse(field, value, allowed)
    items: list[object] = []
    for item in value:
        if len(items) == most:
            refuse(field, f"more than {most} entries", allowed)
        items.append(item)
    return tuple(items)
