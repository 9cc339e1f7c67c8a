"""Command lines whose refusals are one line: the option, its value and what is allowed, and where help is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.near_names import near

__all__ = ["Parser", "integer", "number", "reader"]

_Value = TypeVar("_Value")

UNKNOWN_FLAG = re.compile(r"unrecognized arguments: --([\w-]+)")
"""As argparse begins."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage; of a flag that is none it names the near ones."""

    def error(self, message: str) -> NoReturn:
        named = re.sub(r"^argument ([^:]+): is ", r"\1 is ", message)  # what a reader below has refused
        raise ConfigError(f"{named}{self._near_flags(message)}; see {self.prog} --help")

    def _near_flags(self, message: str) -> str:
        unknown = UNKNOWN_FLAG.match(message)
        known = {flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")}
        also = [] if unknown is None else near(unknown[1], known)
        return f"; near ones: {', '.join(f'--{name}' for name in also)}" if also else ""


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
