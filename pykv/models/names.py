"""Which texts can be the name of a model, told apart before anything heavy is imported or asked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pykv.errors import ModelError

__all__ = ["BUNDLED", "check_name", "local_path"]

BUNDLED = "bundled"

LONGEST_HUB_NAME = 96
PART = r"\w(?:[\w.-]*\w)?"
HUB_NAME = re.compile(rf"(?!.*(?:--|\.\.)){PART}/{PART}(?<!\.git)", re.ASCII)
"""What the hub's own client takes."""
FILE_SUFFIXES = frozenset({".bin", ".gguf", ".json", ".pt", ".pth", ".safetensors"})
LONGEST_SHOWN = 256


def check_name(source: str | Path) -> None:
    """Passes "bundled", what is there on this machine, and what may be there on the model hub, OWNER/NAME.

    Raises:
        ModelError: it is none of them: a path with nothing at its end, or no name.
    """
    path = local_path(source)
    if source and (source == BUNDLED or os.path.isdir(path) or os.path.isfile(path)):
        return  # of a name that no file can have the methods of Path raise
    text = str(source)
    if isinstance(source, Path) or path.suffix in FILE_SUFFIXES or not _is_hub_name(text):
        raise ModelError(
            f"no model at {text[:LONGEST_SHOWN]}: there is no such folder or file, and names of the hub are OWNER/NAME "
            f"here (openai-community/gpt2): allowed are {BUNDLED}, a folder, a GGUF file, or such a name"
        )


def local_path(source: str | Path) -> Path:
    """The path that a source is, with the home of a user for ~ and ~USER; where there is none it stays as it is."""
    try:
        return Path(source).expanduser()
    except (RuntimeError, ValueError):  # nobody has this name; nobody can have it
        return Path(source)


def _is_hub_name(text: str) -> bool:
    return len(text) <= LONGEST_HUB_NAME and HUB_NAME.fullmatch(text) is not None
