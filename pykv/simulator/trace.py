"""A trace of requests, read from a file of any known form."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykv import _core
from pykv.errors import ConfigError, TraceError
from pykv.simulator.formats import azure, measured, mooncake, runs, vllm_bench
from pykv.simulator.formats.rows import Line, Rows

__all__ = ["DEFAULT_BLOCK_SIZE", "Trace", "read_lines", "read_trace"]

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block where a trace does not say what its prompts share."""

AddRow = Callable[[Rows, Line, dict[str, Any]], None]
FORMS: list[tuple[Callable[[dict[str, Any]], bool], AddRow, int | None]] = [
    (mooncake.recognises, mooncake.add_row, mooncake.BLOCK_SIZE),
    (measured.recognises, measured.add_row, None),
]
RECORDING = b"pykv-recording-"
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
        ConfigError: `request_rate` is not above 0.
        OSError: the file cannot be read.
    """
    if not 0 < request_rate < float("inf"):
        raise ConfigError(f"request_rate is {request_rate}: allowed is a finite number above 0")
    content = _content(Path(path))
    name = Path(path).name.partition(".")[0]
    if content.startswith(RECORDING):
        return _recording(content, str(path), name)
    rows = Rows(str(path))
    text = _text(content, rows.path)
    lines = text.splitlines()
    if not lines:
        raise TraceError(f"{path}: is empty")
    if azure.recognises(lines[0]):
        azure.add_rows(rows, lines)
        return Trace(name, DEFAULT_BLOCK_SIZE, False, rows.finish(DEFAULT_BLOCK_SIZE))
    if text.lstrip().startswith("["):
        return _conversations(rows, text, name, request_rate, seed)
    first = _parsed(lines[0], Line(rows.path, 1))
    if runs.recognises(first):
        return _runs(rows, lines, first)
    if vllm_bench.recognises_custom(first):
        texts = vllm_bench.Texts(rows, request_rate, seed)
        _add_lines(rows, lines, 0, lambda _, line, row: texts.add_custom(line, row))
        return Trace(name, vllm_bench.BLOCK_SIZE, True, rows.finish(vllm_bench.BLOCK_SIZE))
    for recognises, add_row, block_size in FORMS:
        if recognises(first):
            _add_lines(rows, lines, 0, add_row)
            size = block_size or DEFAULT_BLOCK_SIZE
            return Trace(name, size, block_size is not None, rows.finish(size))
    raise TraceError(f"{path}, line 1: the fields {sorted(first)} are of no known form; known: {KNOWN}")


def read_lines(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """The JSON objects of a file, gzip'd or not, one a line.

    Raises:
        TraceError: a line is something else.
        OSError: the file cannot be read.
    """
    for place, text in enumerate(_text(_content(path), str(path)).splitlines(), start=1):
        if text:
            line = Line(str(path), place)
            yield line, _parsed(text, line)


def _recording(content: bytes, path: str, name: str) -> Trace:
    try:
        native = _core.Trace.from_recording(content)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    if not native.num_requests:
        raise TraceError(f"{path}: holds no request")
    return Trace(name, native.block_size, True, native)


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: cannot be decompressed: {error}") from error


def _text(content: bytes, path: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TraceError(
            f"{path}, line {line}: byte {error.start} is no UTF-8; known forms: {KNOWN}"
        ) from error


def _runs(rows: Rows, lines: list[str], header: dict[str, Any]) -> Trace:
    size = header["block_size"]
    if size is not None and (type(size) is not int or not 1 <= size <= 65_536):
        message = f"block_size is {str(size)[:60]}: allowed is null or 1 to 65536"
        raise Line(rows.path, 1).error(message)
    _add_lines(rows, lines, 1, runs.add_row)
    name = str(header.get("name") or Path(rows.path).name)
    return Trace(name, size or DEFAULT_BLOCK_SIZE, size is not None, rows.finish(size or DEFAULT_BLOCK_SIZE))


def _conversations(rows: Rows, text: str, name: str, request_rate: float, seed: int) -> Trace:
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise Line(rows.path, error.lineno).error(f"is no JSON: {error.msg}") from error
    if not vllm_bench.recognises_conversations(conversations):
        raise TraceError(
            f"{rows.path}: a JSON list without conversations is of no known form; known: {KNOWN}"
        )
    vllm_bench.Texts(rows, request_rate, seed).add_conversations(conversations)
    return Trace(name, vllm_bench.BLOCK_SIZE, True, rows.finish(vllm_bench.BLOCK_SIZE))


def _add_lines(rows: Rows, lines: list[str], skip: int, add_row: AddRow) -> None:
    for place, text in enumerate(lines[skip:], start=skip + 1):
        if text:
            line = Line(rows.path, place)
            add_row(rows, line, _parsed(text, line))


def _parsed(text: str, line: Line) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise line.error(f"is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise line.error(f"is {text[:60]}: allowed is a JSON object")
    return row
