"""An option of a command that has a value, as the commands' tables of options list it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Option", "add_options", "flag"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        group: under which the help lists it.
        placeholder: stands for the value in the help.
        help: what it is, and its default; None: its name says it.
        read: turns the text into the value; raises ArgumentTypeError, as those of `reader` do.
    """

    group: str
    placeholder: str
    help: str | None
    read: Callable[[str], Any] = str


def add_options(options: Mapping[str, Option], groups: Mapping[str, argparse._ArgumentGroup]) -> None:
    """Adds the options, by their names, to the groups of a parser."""
    for name, option in options.items():
        groups[option.group].add_argument(
            flag(name),
            type=option.read,
            metavar=option.placeholder,
            help=option.help and option.help.replace("%", "%%"),
        )


def flag(name: str) -> str:
    """An option's name as it is typed."""
    return "--" + name.replace("_", "-")
