"""Prints what pyproject.toml's extras require, one requirement a line: `python requirements.py dev`."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN_EXTRAS = re.compile(rf"{PROJECT['name']}\[(?P<extras>[\w,]+)\]")


def expand(extra: str) -> list[str]:
    """The extra's requirements, with this project's own extras replaced by what they hold."""
    found: list[str] = []
    for requirement in EXTRAS[extra]:
        own = OWN_EXTRAS.fullmatch(requirement)
        found += expand_all(own["extras"].split(",")) if own else [requirement]
    return found


def expand_all(extras: list[str]) -> list[str]:
    """The requirements of several extras, each once."""
    return list(dict.fromkeys(requirement for extra in extras for requirement in expand(extra)))


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(PROJECT["dependencies"] + expand_all(sys.argv[1:]))))
