"""How an option that is not allowed is refused: by its name, its value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pykv.errors import ConfigError
from pykv.field_checks import as_integer, as_number_in, one_of, refusal

__all__ = ["checked_choice", "checked_count", "checked_share", "refused", "whole_number"]

LARGEST_COUNT = 2**40


def refused(option: str, value: object, allowed: str) -> ConfigError:
    """The error of an option whose value is not allowed."""
    return refusal(option, value, allowed, ConfigError)


def checked_count(option: str, value: object, least: int = 1, most: int = LARGEST_COUNT) -> int:
    """Returns `value`, an integer from `least` to `most`."""
    return as_integer(option, value, least, most, ConfigError)


def checked_share(option: str, value: object, *, open_below: bool = False, open_above: bool = False) -> float:
    """Returns `value`, a number from 0 to 1; the ends belong to it unless they are open."""
    return as_number_in(option, value, 0.0, 1.0, ConfigError, above_low=open_below, below_high=open_above)


def checked_choice(option: str, value: object, choices: Iterable[str]) -> str:
    """Returns `value`, one of the choices."""
    return one_of(option, value, tuple(choices), ConfigError)


def whole_number(text: str) -> int | None:
    """The number that a text is, with a sign or without; None: it is none, or has more than 18 digits."""
    stripped = text.strip()
    return int(stripped) if re.fullmatch(r"[+-]?[0-9]{1,18}", stripped) else None
