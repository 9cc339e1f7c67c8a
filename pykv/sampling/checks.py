"""Checks of a request's lists: each returns the values in their plain types, or refuses them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pykv.field_checks import as_integer, as_number_in, refuse

_LARGEST_TOKEN_ID = 2**31 - 1


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
    return tuple(as_integer(field, item, 0, _LARGEST_TOKEN_ID) for item in items)


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
        as_integer(field, key, 0, _LARGEST_TOKEN_ID): as_number_in(field, item, -largest, largest)
        for key, item in value.items()
    }


def _is_unicode(text: str) -> bool:
    """Whether no lone surrogate is in the text."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _bounded(field: str, value: object, most: int, allowed: str) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        refuse(field, value, allowed)
    try:
        each = iter(value)
    except TypeError:  # an array without dimensions
        refuse(field, value, allowed)
    items: list[object] = []
    for item in each:
        if len(items) == most:
            refuse(field, f"more than {most} entries", allowed)
        items.append(item)
    return tuple(items)
