"""Reads options from the command line, the environment and a TOML file; the first that gives a value wins."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from pykv.cli.parser import Parser
from pykv.errors import ConfigError
from pykv.near_names import near
from pykv.service.files import read_toml, shortened, shown
from pykv.service.options.kinds import FLAG
from pykv.service.options.service_links import is_service_link
from pykv.service.options.table import ALTERNATIVES, ServeOptions, group_of, help_of, kind_of

__all__ = ["OTHER_VARIABLES", "read_options"]

PREFIX = "PYKV_"
CONFIG_VARIABLE = "PYKV_CONFIG"
OTHER_VARIABLES = frozenset({"PYKV_CACHE_DIR"})
"""Variables that parts of pykv other than the daemon read."""

OPTIONS: Mapping[str, Field[Any]] = {entry.name: entry for entry in fields(ServeOptions)}

Values = dict[str, Any]


def read_options(arguments: Sequence[str], environment: Mapping[str, str], version: str) -> ServeOptions:
    """The options of one start of the daemon.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or the file cannot be read.
        SystemExit: the help or the version was asked for.
    """
    given = vars(_parser(version).parse_args(arguments))
    path = given.pop("config", environment.get(CONFIG_VARIABLE))
    of_file = {} if path is None else _file_values(Path(path))
    of_line = {name: _read(name, value, _flag_of(name)) for name, value in given.items()}
    return ServeOptions(**_merge(of_file, _environment_values(environment), of_line))


def _merge(*sources: Values) -> Values:
    """The sources in order, weakest first."""
    merged: Values = {}
    for source in sources:
        for group in ALTERNATIVES:
            if group & source.keys():
                merged = {name: value for name, value in merged.items() if name not in group}
        merged |= source
    return merged


def _read(name: str, value: Any, shown_name: str) -> Any:
    kind = kind_of(OPTIONS[name])
    try:
        read = kind.read(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        read = None
    if read is None:
        raise ConfigError(f"{shown_name} is {shown(value)}: allowed is {kind.allowed}")
    return read


def _environment_values(environment: Mapping[str, str]) -> Values:
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    values = {}
    for variable, value in environment.items():
        if is_service_link(variable, value):
            continue
        if variable in known:
            values[known[variable]] = _read(known[variable], value, variable)
        elif variable.startswith(PREFIX) and variable not in {CONFIG_VARIABLE, *OTHER_VARIABLES}:
            raise _unknown(variable, PREFIX, known, "variable of pykv-serve")
    return values


def _file_values(path: Path) -> Values:
    values = {}
    for name, value in read_toml(path, "config").items():
        if name not in OPTIONS:
            raise _unknown(name, "", OPTIONS, f"option of pykv-serve, in {path}")
        values[name] = _read(name, value, f"{name} in {path}")
    return values


def _unknown(name: str, prefix: str, known: Iterable[str], what: str) -> ConfigError:
    """The error of a name that is none, with those that may have been meant.

    Args:
        prefix: that all of the known names have, so that it does not count for how near one is.
    """
    bare = [each.removeprefix(prefix) for each in known]
    also = ", ".join(prefix + each for each in near(name.removeprefix(prefix), bare))
    hint = f"near ones: {also}; see" if also else "see"
    return ConfigError(f"{shortened(name)} is no {what}; {hint} pykv-serve --help")


class _Parser(Parser):
    """Refuses within few characters, whatever was given."""

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message, 300))


def _parser(version: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pykv-serve",
        usage="%(prog)s [--config FILE] [OPTION ...]",
        description="Serves one language model over gRPC, its KV cache paged and shared.",
        epilog="Every option can also be given as a variable (PYKV_BLOCK_SIZE) or in a TOML file "
        "(block_size = 16). The command line wins over variables, they win over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"pykv {version}")
    parser.add_argument("--config", metavar="FILE", help="TOML file of options")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, entry in OPTIONS.items():
        group = groups.setdefault(group_of(entry), parser.add_argument_group(group_of(entry)))
        _add_argument(group, name, entry)
    return parser


def _add_argument(group: argparse._ArgumentGroup, name: str, entry: Field[Any]) -> None:
    text = help_of(entry).replace("%", "%%")
    if kind_of(entry) is FLAG:
        group.add_argument(_flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(_flag_of(name), dest=name, metavar=kind_of(entry).placeholder, help=text)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
