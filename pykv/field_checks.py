"""Checks of single fields at the Python face: each returns the value in its plain type, or refuses it.

An error names the field, the value and what is allowed, and comes before anything was changed. Numbers of numpy are
taken wherever Python's are, and a bool is no number.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard, TypeVar

from pykv.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    PykvError,
    RecordingError,
    StepError,
)

__all__ = [
    "as_boolean",
    "as_bytes",
    "as_callable",
    "as_integer",
    "as_number",
    "as_number_in",
    "as_path",
    "as_text",
    "duplicate_request",
    "instance_of",
    "integer_range",
    "is_integer",
    "number_range",
    "one_of",
    "optional",
    "refusal",
    "refuse",
    "shown",
]

_Instance = TypeVar("_Instance")
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_Error = TypeVar("_Error", bound=PykvError)

_LONGEST_SHOWN = 120
_MOST_OF_64_BITS = 2**64 - 1


def shown(value: object) -> str:
    """Returns a value as an error shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # what a foreign object's repr raises must not hide the error that is being made
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def refusal(field: str, value: object, allowed: str, error: type[_Error]) -> _Error:
    """Returns an error of this class, with the field as its attribute where it has one."""
    message = f"{field} is {shown(value)}: allowed is {allowed}"
    return error(message, field) if issubclass(error, InvalidRequestError) else error(message)


def refuse(field: str, value: object, allowed: str, error: type[PykvError] = InvalidRequestError) -> NoReturn:
    """Raises what `refusal` returns."""
    raise refusal(field, value, allowed, error)


def duplicate_request(request_id: str) -> DuplicateRequestError:
    """Returns the error of an id that a live request has."""
    return DuplicateRequestError(f"request_id {shown(request_id)} is live already")


def optional(check: Callable[..., _Instance], field: str, value: object, *arguments: Any) -> _Instance | None:
    """Returns None as it is, and any other value as `check(field, value, *arguments)` does."""
    return None if value is None else check(field, value, *arguments)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, numpy's included. A bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_integer(
    field: str, value: object, low: int, high: int, error: type[PykvError] = InvalidRequestError
) -> int:
    """Returns an integer, numpy's included, from `low` to `high`. A bool is none."""
    if type(value) is int and low <= value <= high:
        return value
    if is_integer(value) and low <= int(value) <= high:
        return int(value)
    refuse(field, value, integer_range(low, high), error)


def integer_range(low: int, high: int) -> str:
    """What is allowed, in words: an integer from `low` to `high`, which may be all that 64 bits hold."""
    if high == _MOST_OF_64_BITS:
        return f"an integer of at least {low}, in 64 bits"
    return f"an integer from {low} to {high}"


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


def as_number_in(
    field: str,
    value: object,
    low: float,
    high: float,
    error: type[PykvError] = InvalidRequestError,
    *,
    above_low: bool = False,
    below_high: bool = False,
) -> float:
    """Returns a real number, numpy's included, from `low` to `high`, as a float. NaN and a bool are none.

    Args:
        above_low, below_high: whether the end itself is not allowed. Below an infinite end are all finite numbers.
    """
    number = value if type(value) is float else _real(value)
    is_above = number > low if above_low else number >= low
    if is_above and (number < high if below_high else number <= high):
        return number
    refuse(field, value, number_range(low, high, above_low=above_low, below_high=below_high), error)


def _real(value: object) -> float:
    """A real number as a float: NaN where it is none, or passes all floats."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def number_range(low: float, high: float, *, above_low: bool = False, below_high: bool = False) -> str:
    """What is allowed, in words: a number from `low` to `high`, the ends as in `as_number_in`."""
    begin = f"{'above' if above_low else 'of at least'} {low:g}"
    if math.isinf(high):
        return f"a finite number {begin}"
    if not above_low and not below_high:
        return f"a number from {low:g} to {high:g}"
    return f"a number {begin} and {'below' if below_high else 'at most'} {high:g}"


def as_boolean(field: str, value: object, error: type[PykvError] = InvalidRequestError) -> bool:
    """Returns a bool; no other value counts as true or false."""
    if value is True or value is False:
        return value
    refuse(field, value, "True or False", error)


def as_text(field: str, value: object, error: type[PykvError] = InvalidRequestError) -> str:
    """Returns a text, which may be empty."""
    if isinstance(value, str):
        return value
    refuse(field, value, "a text", error)


def as_callable(field: str, value: _Callable, error: type[PykvError] = InvalidRequestError) -> _Callable:
    """Returns what can be called."""
    if callable(value):
        return value
    refuse(field, value, "what can be called", error)


def as_bytes(field: str, value: object) -> bytes:
    """Returns bytes; text is none."""
    if isinstance(value, bytes):
        return value
    refuse(field, value, "bytes")


def one_of(field: str, value: object, choices: tuple[str, ...], error: type[PykvError] = ConfigError) -> str:
    """Returns one of the names."""
    if isinstance(value, str) and value in choices:
        return value
    refuse(field, value, f"one of {', '.join(choices)}", error)


def instance_of(
    field: str, value: object, kind: type[_Instance], error: type[PykvError] = StepError
) -> _Instance:
    """Returns an object of this class."""
    if isinstance(value, kind):
        return value
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    refuse(field, value, f"{article} {kind.__name__}", error)


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
