"""Sizes in bytes and large counts, read and shown exactly: 1 GB is 10**9 bytes, 1 GiB is 2**30."""

from __future__ import annotations

import re
from fractions import Fraction

from pykv.field_checks import is_integer
from pykv.planner.checks import refused

__all__ = ["read_bytes", "read_parameters", "show_bytes"]

UNITS = {
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
SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
LARGEST = 2**60

ALLOWED_BYTES = (
    "a size above 0 with its unit, such as 80GiB, 140GB or 512MiB (GiB is 2**30 bytes, GB is 10**9)"
)
ALLOWED_PARAMETERS = "a number above 0, such as 8030261248, 70.6B or 135M"


def read_bytes(option: str, value: object, *, zero: bool = False) -> int:
    """The bytes of a size: a whole number of bytes, or a text with a unit.

    Raises:
        ConfigError: it is neither, or not above 0 (with `zero`: below 0).
    """
    if is_integer(value):
        number = Fraction(int(value))
    elif isinstance(value, str) and zero and value.strip() == "0":
        number = Fraction(0)
    else:
        number = _scaled(option, value, UNITS, ALLOWED_BYTES)
    least = 0 if zero else 1
    if not least <= number <= LARGEST:
        raise refused(option, value, ALLOWED_BYTES)
    return int(number)


def read_parameters(option: str, value: object) -> int:
    """A number of parameters: a whole number, or a text such as 70.6B.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        value = int(value)
    number = Fraction(int(value)) if is_integer(value) else _scaled(option, value, SCALES, ALLOWED_PARAMETERS)
    if not 1 <= number <= LARGEST:
        raise refused(option, value, ALLOWED_PARAMETERS)
    return int(number)


def _scaled(option: str, value: object, units: dict[str, int], allowed: str) -> Fraction:
    match = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match["unit"].lower() not in units:
        raise refused(option, value, allowed)
    return Fraction(match["number"]) * units[match["unit"].lower()]


def show_bytes(num_bytes: float) -> str:
    """A size in both kinds of unit, such as "2.62 GB (2.44 GiB)"."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:,.0f} B"
    decimal, binary = _in_units(num_bytes, 1000), _in_units(num_bytes, 1024)
    return f"{decimal} ({binary})" if binary else decimal


def _in_units(num_bytes: float, base: int) -> str:
    names = {1000: ("B", "kB", "MB", "GB", "TB", "PB"), 1024: ("B", "KiB", "MiB", "GiB", "TiB", "PiB")}[base]
    power = 0
    while power + 1 < len(names) and abs(num_bytes) >= base ** (power + 1):
        power += 1
    if power == 0:
        return "" if base == 1024 else f"{num_bytes:,.0f} B"
    scaled = num_bytes / base**power
    return f"{scaled:,.{max(0, 3 - len(str(int(abs(scaled)))))}f} {names[power]}"
