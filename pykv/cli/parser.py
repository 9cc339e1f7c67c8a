"""Command lines whose refusals are one line: the option, its value and what is allowed, and where help is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pykv.errors import ConfigError
from pykv.field_checks import shown

__all__ = ["Parser", "integer", "number", "reader"]

_Value = TypeVar("_Value")


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        named = re.sub(r"^argument ([^:]+): is ", r"\1 is ", message)  # what a reader below has refused
        raise ConfigError(f"{named}; see {self.prog} --help")


def reader(read: Callable[[str], _Value], allowed: str) -> Callable[[str], _Value]:
    """What turns an option's text into its value, for `type` of an argument.

    Args:
        read: raises ValueError where the text is not allowed.
        allowed: what is, in words.
    """

    def refusing(text: str) -> _Value:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {shown(text)}: allowed is {allowed}") from None

    return refusing


integer = reader(int, "an integer")
number = reader(float, "a number")
