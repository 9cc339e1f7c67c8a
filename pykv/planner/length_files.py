"""Reads the lengths of requests from files: a histogram, or a trace of requests."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.planner.checks import whole_number
from pykv.planner.lengths import LARGEST_CONTEXT, LengthDistribution

__all__ = ["TraceLengths", "read_histogram", "read_trace"]

LARGEST_OF_TRACE = 2**23
"""Tokens: every length up to the longest is counted."""
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """The lengths of a trace's requests.

    Attributes:
        final: prompt and output together, each request once.
        held: the tokens that a request holds at a step of its decoding, each step once: requests with long outputs
            hold their blocks for longer, so they count for more.
    """

    final: LengthDistribution
    held: LengthDistribution


def read_histogram(path: Path) -> LengthDistribution:
    """Reads lines of `tokens,count`; a first line that is no number is a heading, empty lines and `#` lines are none.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed; the message names the line and the field.
    """
    tokens, counts = [], []
    for line, row in _rows(path):
        if line == 1 and whole_number(row[0]) is None:
            continue
        if len(row) != 2:
            _malformed("histogram", path, line, f"{len(row)} fields: allowed is tokens,count")
        tokens.append(_whole("histogram", path, line, "tokens", row[0], 1, LARGEST_CONTEXT))
        counts.append(_whole("histogram", path, line, "count", row[1], 0, 2**40))
    if not any(counts):
        raise ConfigError(
            f"histogram is {str(path)!r}, in which no request is counted: allowed is lines of tokens,count"
        )
    return LengthDistribution.of(
        np.array(tokens, np.int64), np.array(counts, np.int64), f"histogram {path.name}"
    )


def read_trace(path: Path) -> TraceLengths:
    """Reads a trace of any form that `pykv replay` reads; of its requests the lengths alone count.

    Raises:
        ConfigError: the file cannot be read, or a request is too long to be planned for.
        TraceError: a line is malformed; the message names the line and the field.
    """
    from pykv.simulator.trace import (
        read_trace as read_replay_trace,
    )  # it needs the compiled core, a plan does not

    try:
        trace = read_replay_trace(path)
    except OSError as error:
        raise ConfigError(
            f"trace is {str(path)!r}, which cannot be read: {error.strerror or error}"
        ) from error
    prompts, outputs = (np.array(column, np.int64) for column in trace.native.lengths())
    source = f"trace {path.name}, {len(prompts):,} requests"
    ends = prompts + outputs
    if ends.max() > LARGEST_OF_TRACE:
        raise ConfigError(
            f"trace is {str(path)!r}, in which a request has {ends.max():,} tokens: allowed is at most "
            f"{LARGEST_OF_TRACE:,}, prompt and output together"
        )
    final = LengthDistribution.of(ends, np.ones(len(ends), np.int64), source)
    return TraceLengths(final, _held(prompts, np.maximum(ends, prompts + 1), source))


def _held(starts: Any, ends: Any, source: str) -> LengthDistribution:
    """Of each length how many steps there are at which a request has it: a request has start, start + 1, …, end - 1."""
    changes = np.zeros(int(ends.max()) + 1, np.int64)
    np.add.at(changes, starts, 1)
    np.subtract.at(changes, ends, 1)
    steps = np.cumsum(changes)
    lengths = np.flatnonzero(steps)
    return LengthDistribution(lengths, steps[lengths], source)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    for line, text in enumerate(_lines("histogram", path), 1):
        if text.strip() and not text.lstrip().startswith("#"):
            yield line, next(csv.reader([text]))


def _lines(option: str, path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be read: {error.strerror or error}"
        ) from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} is {str(path)!r}, which is no text: {error}") from error


def _whole(option: str, path: Path, line: int, name: str, text: str, least: int, most: int) -> int:
    number = whole_number(text)
    if number is None or not least <= number <= most:
        what = f"{name} is {shown(text.strip())}: allowed is a whole number from {least} to {most}"
        _malformed(option, path, line, what)
    return number


def _malformed(option: str, path: Path, line: int, what: str) -> NoReturn:
    raise ConfigError(f"{option} {str(path)!r}, line {line}: {what}")
