"""Small traces, and the public ones where they are there."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Beside the clone, or beside the folder that holds clones.
SHARED = next((folder / "shared" for folder in ROOT.parents if (folder / "shared/traces").is_dir()), None)

Request = tuple[float, int, int, str | None, list[list[int]] | None]
WriteTrace = Callable[..., Path]
Documented = Callable[[str], list[list[str]]]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Writes a trace in pykv's own form."""

    def write(requests: Iterable[Request], block_size: int | None = 16, name: str = "trace.jsonl") -> Path:
        rows: list[object] = [{"name": "small", "block_size": block_size}]
        rows += [dict(zip(("ts", "in", "out", "s", "h"), request, strict=True)) for request in requests]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@pytest.fixture
def fit_commands() -> Documented:
    """The commands that the documents show of `pykv fit`, whose files are not a part of this project."""
    return _fit_commands


def _fit_commands(first_word: str) -> list[list[str]]:
    """The `pykv` lines, as arguments, of the block whose `pykv fit` reads files named so; patterns expanded."""
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        rf"^```text\n((?:(?!```).*\n)*pykv fit {first_word}.*\n(?:(?!```).*\n)*)```$", text, re.M
    )
    lines = [shlex.split(line) for line in block.splitlines() if line.startswith("pykv ")]
    return [[word for part in line[1:] for word in _expanded(part)] for line in lines]


def _expanded(word: str) -> list[str]:
    return [str(path) for path in sorted(Path().glob(word))] if "*" in word else [word]


@pytest.fixture(scope="session")
def public_traces() -> Path:
    """The folder of the public traces."""
    if SHARED is None:
        pytest.skip("../shared/traces is not there")
    return SHARED / "traces"
