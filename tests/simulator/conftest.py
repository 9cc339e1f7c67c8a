"""Small traces, and the public ones where they are there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Beside the clone, or beside the folder that holds clones.
SHARED = next((folder / "shared" for folder in ROOT.parents if (folder / "shared/traces").is_dir()), None)

Request = tuple[float, int, int, str | None, list[list[int]] | None]
WriteTrace = Callable[..., Path]


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


@pytest.fixture(scope="session")
def public_traces() -> Path:
    """The folder of the public traces."""
    if SHARED is None:
        pytest.skip("../shared/traces is not there")
    return SHARED / "traces"
