"""A trace of requests, read from a file of any known form."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from pykv import _core
from pykv.errors import ConfigError, TraceError
from pykv.field_checks import as_integer, as_number_in
from pykv.simulator.formats import azure, measured, mooncake, runs, vllm_bench
from pykv.simulator.formats.rows import Line, Rows

__all__ = ["DEFAULT_BLOCK_SIZE", "Trace", "read_lines", "read_trace"]

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block where a trace does not say what its prompts share."""

AddRow = Callable[[Rows, Line, dict[str, Any]], None]
FORMS: list[tuple[Callable[[dict[str, Any]], bool], AddRow, int | None]] = [
    (mooncake.recognises, mooncake.add_row, mooncake.BLOCK_SIZE),
    (measured.recognises, measured.add_row, None),
    (runs.recognises_row, runs.add_row, None),
]
RECORDING = b"pykv-recording-"
"""What a recording begins with."""
KNOWN = "pykv's own, Mooncake's, Azure's, vLLM's benchmarks', a measured run, or a recording"


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: of the trace, or of its file.
        block_size: tokens a block.
        has_blocks: whether it says which blocks its prompts are made of, so that hits can be found.
        num_requests: how many there are.
    """

    name: str
    block_size: int
    has_blocks: bool
    native: _core.Trace = field(repr=False)

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return self.native.num_requests


def read_trace(path: str | os.PathLike[str], *, request_rate: float = 1.0, seed: int = 0) -> Trace:
    """Reads a file, gzip'd or not, whose form is told by its first line.

    Args:
        path: of the file. Forms: pykv's own JSON lines, Mooncake's, Azure's CSV, vLLM's benchmarks' (custom JSON lines,
            ShareGPT), a measured run, and recordings of `Scheduler.record`.
        request_rate: requests a second, for a form that has no times; they come at random moments (Poisson).
        seed: of these moments.

    Raises:
        TraceError: the form is unknown, or a line is wrong: the message names the line and the field.
        ConfigError: `request_rate` is not above 0, or `seed` below it.
        OSError: the file cannot be read.
    """
    as_integer("seed", seed, 0, 2**63 - 1, ConfigError)
    as_number_in("request_rate", request_rate, 0.0, math.inf, ConfigError, above_low=True, below_high=True)
    name = Path(path).name.partition(".")[0]
    rows = Rows(str(path))
    lines = _numbered(Path(path))
    line, first = next(lines, (Line(str(path), 1), b""))
    if first.startswith(RECORDING):
        return _recording(Path(path), name)
    if first.lstrip().startswith(b"["):
        return _conversations(rows, _content(Path(path)), name, request_rate, seed)
    if azure.recognises(header := _text(first, line)):
        azure.add_rows(rows, itertools.chain([header], (_text(text, line) for line, text in lines)))
        return Trace(name, DEFAULT_BLOCK_SIZE, False, rows.finish(DEFAULT_BLOCK_SIZE))
    if not first:
        raise TraceError(f"{path}: is empty")
    if "," in header and not header.lstrip("\ufeff \t").startswith("{"):
        raise line.error(
            f"the columns {header.strip()[:60]!r} are of no known form; known of CSV: {','.join(azure.HEADER)}"
        )
    row = _parsed(first, line)
    if runs.recognises(row):
        return _runs(rows, lines, line, row)
    lines = itertools.chain([(line, first)], lines)
    if vllm_bench.recognises_custom(row):
        texts = vllm_bench.Texts(rows, request_rate, seed)
        _add_lines(rows, lines, lambda _, line, row: texts.add_custom(line, row))
        return Trace(name, vllm_bench.BLOCK_SIZE, True, rows.finish(vllm_bench.BLOCK_SIZE))
    for recognises, add_row, block_size in FORMS:
        if recognises(row):
            _add_lines(rows, lines, add_row)
            size = block_size or DEFAULT_BLOCK_SIZE
            return Trace(name, size, block_size is not None, rows.finish(size))
    raise line.error(f"the fields {sorted(row)} are of no known form; known: {KNOWN}")


def read_lines(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """The JSON objects of a file, gzip'd or not, one a line.

    Raises:
        TraceError: a line is something else.
        OSError: the file cannot be read.
    """
    return ((line, _parsed(text, line)) for line, text in _numbered(path) if text.strip())


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_compressed else path.open("rb")


def _numbered(path: Path) -> Iterator[tuple[Line, bytes]]:
    place = 0
    try:
        with _open(path) as file:
            for place, text in enumerate(file, start=1):
                yield Line(str(path), place), text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Line(str(path), place + 1).error(f"cannot be decompressed: {error}") from error


def _content(path: Path) -> bytes:
    return b"".join(text for _, text in _numbered(path))


def _recording(path: Path, name: str) -> Trace:
    try:
        native = _core.Trace.from_recording(_content(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    if not native.num_requests:
        raise TraceError(f"{path}: holds no request")
    return Trace(name, native.block_size, True, native)


def _text(content: bytes, line: Line) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise line.error(f"byte {error.start} is no UTF-8; known forms: {KNOWN}") from error


def _runs(rows: Rows, lines: Iterable[tuple[Line, bytes]], line: Line, header: dict[str, Any]) -> Trace:
    size = header["block_size"]
    if size is not None and (type(size) is not int or not 1 <= size <= 65_536):
        raise line.error(f"block_size is {str(size)[:60]}: allowed is null or 1 to 65536")
    _add_lines(rows, lines, runs.add_row)
    name = str(header.get("name") or Path(rows.path).name)
    return Trace(name, size or DEFAULT_BLOCK_SIZE, size is not None, rows.finish(size or DEFAULT_BLOCK_SIZE))


def _conversations(rows: Rows, content: bytes, name: str, request_rate: float, seed: int) -> Trace:
    try:
        conversations = json.loads(content)
    except json.JSONDecodeError as error:
        raise Line(rows.path, error.lineno).error(f"is no JSON: {error.msg}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{rows.path}: is no JSON: {error}") from error
    if not vllm_bench.recognises_conversations(conversations):
        raise TraceError(
            f"{rows.path}: a JSON list without conversations is of no known form; known: {KNOWN}"
        )
    vllm_bench.Texts(rows, request_rate, seed).add_conversations(conversations)
    return Trace(name, vllm_bench.BLOCK_SIZE, True, rows.finish(vllm_bench.BLOCK_SIZE))


def _add_lines(rows: Rows, lines: Iterable[tuple[Line, bytes]], add_row: AddRow) -> None:
    for line, text in lines:
        if text.strip():
            add_row(rows, line, _parsed(text, line))


def _parsed(content: bytes, line: Line) -> dict[str, Any]:
    text = _text(content, line)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # of ValueErrors one is of numbers with too many digits
        raise line.error(f"is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise line.error(f"is {text.strip()[:60]}: allowed is a JSON object")
    return row
