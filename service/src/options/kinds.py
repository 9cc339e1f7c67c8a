"""How the value of an option is read: a kind takes what a source has and returns the value in its type."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pykv.field_checks import integer_range, is_integer, number_range
from pykv.scheduler_config import OPTION_RANGES

__all__ = [
    "FILE",
    "FLAG",
    "HOST",
    "SCALES",
    "SIZE",
    "SPACE",
    "TEXT",
    "URL",
    "ZMQ_ADDRESS",
    "Kind",
    "choice",
    "integer",
    "number",
    "of_scheduler",
    "rate",
    "seconds",
    "share",
]

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
MOST = 2**48
SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
URL_PATTERN = re.compile(r"https?://[^\s/]+(/\S*)?")
ZMQ_PATTERN = re.compile(r"ipc://.+|tcp://(\*|[^\s:/*]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5}|\*)")
FLAGS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        read: returns the value; raises ValueError, or returns None, where it is not allowed.
        allowed: what is, in words.
        placeholder: stands for the value in the help.
        is_range: whether the help says what is allowed.
    """

    read: Callable[[Any], Any]
    allowed: str
    placeholder: str
    is_range: bool = False


def integer(low: int, high: int) -> Kind:
    """An integer from `low` to `high`."""
    return Kind(lambda value: _within(_integer(value), low, high), integer_range(low, high), "N", True)


def of_scheduler(option: str) -> Kind:
    """An integer in the range that the scheduler has for an option."""
    return integer(*OPTION_RANGES[option])


def seconds(low: float, high: float) -> Kind:
    """A time in seconds from `low` to `high`."""
    return number(low, high, "SECONDS")


def rate(low: float, high: float) -> Kind:
    """So many a second, from `low` to `high`."""
    return number(low, high, "RATE")


def share(*, above_low: bool = False, below_high: bool = False) -> Kind:
    """A number from 0 to 1; the ends may be left out."""
    return number(0.0, 1.0, "SHARE", above_low=above_low, below_high=below_high)


def number(
    low: float, high: float, placeholder: str, *, above_low: bool = False, below_high: bool = False
) -> Kind:
    """A number from `low` to `high`; the ends may be left out."""

    def read(value: Any) -> float | None:
        real = _real(value)
        is_end = (above_low and real == low) or (below_high and real == high)
        return None if is_end else _within(real, low, high)

    allowed = number_range(low, high, above_low=above_low, below_high=below_high)
    return Kind(read, allowed, placeholder, True)


def choice(*words: str) -> Kind:
    """One of some words."""
    return Kind(
        lambda value: value if value in words else None, f"one of {', '.join(words)}", "|".join(words)
    )


def _integer(value: Any) -> int:
    if not isinstance(value, str) and not is_integer(value):
        raise ValueError
    return int(_ascii(value))


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return float(_ascii(value))


def _ascii(value: Any) -> Any:
    """The value, unless it is a text with digits of another script, which Python would read."""
    if isinstance(value, str) and not value.isascii():
        raise ValueError
    return value


def _within(value: Any, low: float, high: float) -> Any:
    return value if low <= value <= high else None  # NaN is within nothing


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else FLAGS.get(str(value).lower())


def _size(value: Any) -> int | None:
    size = _num_bytes(value)
    return None if size is None else _within(size, 1, MOST)


def _num_bytes(value: Any) -> int | None:
    if is_integer(value):
        return int(value)
    match = SIZE_PATTERN.fullmatch(str(value).strip().lower())
    if match is None or match[2] not in UNITS:
        return None
    size = Fraction(match[1]) * UNITS[match[2]]
    return int(size) if size.denominator == 1 else None


def _size_or_none(value: Any) -> int | None:
    return 0 if str(value).strip() == "0" else _size(value)


def _scale_pair(value: Any) -> tuple[float, float]:
    of_keys, of_values = map(_real, value.split(",") if isinstance(value, str) else value)
    return of_keys, of_values


URL = Kind(
    lambda value: value if isinstance(value, str) and URL_PATTERN.fullmatch(value) else None,
    "a URL of http or https, such as http://127.0.0.1:4318",
    "URL",
)
ZMQ_ADDRESS = Kind(
    lambda value: value if isinstance(value, str) and ZMQ_PATTERN.fullmatch(value) else None,
    "an address of ZeroMQ to listen on, such as tcp://127.0.0.1:5557 or ipc:///run/pykv-events",
    "ADDRESS",
)
TEXT = Kind(_text, "a text that is not empty", "TEXT")
FILE = Kind(_text, "the path of a file", "FILE")
HOST = Kind(_text, "an address or a name of this machine", "HOST")
FLAG = Kind(_flag, "true or false", "BOOL")
SIZE = Kind(_size, "a whole number of bytes from 1 to 256TiB, such as 2GiB, 500MB or 1048576", "SIZE")
SPACE = Kind(_size_or_none, "a whole number of bytes from 0 to 256TiB, such as 4GiB or 500MB", "SIZE")
SCALES = Kind(_scale_pair, "two numbers above 0, of the keys and of the values, such as 0.05,0.5", "K,V")
