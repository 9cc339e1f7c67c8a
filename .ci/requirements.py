"""Prints what pyproject.toml's extras require, one requirement a line: `python requirements.py dev`."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN_EXTRA = re.compile(rf"{PROJECT['name']}\[(?P<extra>\w+)\]")


def expand(extra: str) -> list[str]:
    """The extra's requirements, with this project's own extras replaced by what they hold."""
    found: list[str] = []
    for requirement in EXTRAS[extra]:
        own = OWN_EXTRA.fullmatch(requirement)
        found += expand(own["extra"]) if own else [requirement]
    return found


if __name__ == "__main__":
    wanted = list(PROJECT["dependencies"])
    for name in sys.argv[1:]:
        wanted += expand(name)
    print("\n".join(dict.fromkeys(wanted)))
