"""Checks of single fields at the Python face of the core: their types, and what the compiled core can take.

What a value means is checked by the core. An error names the field, the value and what is allowed, and comes before
anything was changed.
"""

from __future__ import annotations

import numbers
import os
from typing import NoReturn, TypeVar

from pykv.errors import InvalidRequestError, PykvError, RecordingError, StepError

__all__ = [
    "as_boolean",
    "as_bytes",
    "as_integer",
    "as_number",
    "as_path",
    "instance_of",
    "refuse",
    "shown",
]

_Instance = TypeVar("_Instance")

_LONGEST_SHOWN = 120


def shown(value: object) -> str:
    """Returns a value as an error shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # what a foreign object's repr raises must not hide the error that is being made
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def refuse(field: str, value: object, allowed: str, error: type[PykvError] = InvalidRequestError) -> NoReturn:
    """Raises an error of this class, with the field as its attribute where it has one."""
    message = f"{field} is {shown(value)}: allowed is {allowed}"
    raise error(message, field) if issubclass(error, InvalidRequestError) else error(message)


def as_integer(
    field: str, value: object, low: int, high: int, error: type[PykvError] = InvalidRequestError
) -> int:
    """Returns an integer, numpy's included, from `low` to `high`. A bool is none."""
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= int(value) <= high:
        return int(value)
    refuse(field, value, f"an integer from {low} to {high}", error)


def as_number(field: str, value: object, error: type[PykvError] = InvalidRequestError) -> float:
    """Returns a real number, numpy's included, as a float: it may be NaN or infinite. A bool is none."""
    if type(value) is float:
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            refuse(field, value, "a number in the range of a float", error)
    refuse(field, value, "a number", error)


def as_boolean(field: str, value: object, error: type[PykvError] = InvalidRequestError) -> bool:
    """Returns a bool; no other value counts as true or false."""
    if value is True or value is False:
        return value
    refuse(field, value, "True or False", error)


def as_bytes(field: str, value: object) -> bytes:
    """Returns bytes; text is none."""
    if isinstance(value, bytes):
        return value
    refuse(field, value, "bytes")


def instance_of(
    field: str, value: object, kind: type[_Instance], error: type[PykvError] = StepError
) -> _Instance:
    """Returns an object of this class."""
    if isinstance(value, kind):
        return value
    refuse(field, value, f"a {kind.__name__}", error)


def _is_encodable(path: str) -> bool:
    """Whether the file system has a name for it: a lone surrogate has none."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def as_path(field: str, value: object) -> str | os.PathLike[str]:
    """Returns what can name a file."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and path and "\0" not in path and _is_encodable(path):
        return path
    refuse(field, value, "a path", RecordingError)
