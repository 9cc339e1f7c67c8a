"""What every format's reader fills: the columns of a trace, with the line that each request came from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pykv import _core
from pykv.errors import TraceError

__all__ = ["MAX_NUMBER", "Line", "Rows", "integer", "number", "runs_of", "session"]

MAX_SYMBOL = 2**30
"""The compiled core numbers the blocks of a trace below this."""


MAX_NUMBER = 2**63 - 1
"""What a column can hold."""


class Line:
    """One line of a file, to be named where it is wrong."""

    __slots__ = ("number", "path")

    def __init__(self, path: str, number: int) -> None:
        self.path, self.number = path, number

    def error(self, message: str) -> TraceError:
        """The error to raise for what is wrong here."""
        return TraceError(f"{self.path}, line {self.number}: {message}")


def integer(row: dict[str, Any], field: str, line: Line) -> int:
    """A whole number of at least 0 out of a JSON object.

    Raises:
        TraceError: it is missing or something else.
    """
    value = row.get(field)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise line.error(f"{field} is {_shown(row, field)}: allowed is a whole number of at least 0")
    return value


def number(row: dict[str, Any], field: str, line: Line) -> float:
    """A finite number out of a JSON object.

    Raises:
        TraceError: it is missing or something else.
    """
    value = row.get(field)
    if type(value) not in (int, float) or not -1e300 < value < 1e300:  # type: ignore[operator]
        raise line.error(f"{field} is {_shown(row, field)}: allowed is a finite number")
    return float(value)  # type: ignore[arg-type]


def session(row: dict[str, Any], field: str, line: Line) -> str | int | None:
    """What names a request's session, out of a JSON object; None: it belongs to none.

    Raises:
        TraceError: it is something else.
    """
    value = row.get(field)
    if value is not None and type(value) not in (str, int):
        raise line.error(f"{field} is {_shown(row, field)}: allowed are null, a text or a whole number")
    return value


def _shown(row: dict[str, Any], field: str) -> str:
    return repr(row[field])[:60] if field in row else "missing"


class Rows:
    """The requests of one file.

    Args:
        path: of the file, for errors.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lines: list[int] = []
        self._arrivals: list[float] = []
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._sessions: list[int] = []
        self._session_numbers: dict[str | int, int] = {}
        self._num_runs: list[int] = []
        # A trace may have millions of runs: 8 bytes a number, not a Python object.
        self._starts, self._lengths = array("q"), array("q")

    def add(
        self,
        line: Line,
        *,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        session: str | int | None = None,
        runs: Iterable[Sequence[int]] = (),
    ) -> None:
        """Adds one request.

        Args:
            line: where it stands.
            arrival: seconds.
            prompt_tokens: tokens of its prompt.
            output_tokens: tokens that are generated.
            session: whatever names its session; None: it has none.
            runs: its prompt's blocks: pairs of a first block's number and how many follow each other from there.
        """
        before = len(self._starts)
        for start, length in runs:
            if not 0 <= start <= start + length - 1 <= MAX_NUMBER:
                allowed = f"a number of at least 1, all from 0 to {MAX_NUMBER}"
                raise line.error(f"{length} blocks from {start} on: allowed is {allowed}")
            self._starts.append(start)
            self._lengths.append(length)
        self._lines.append(line.number)
        self._arrivals.append(arrival)
        self._prompts.append(prompt_tokens)
        self._outputs.append(output_tokens)
        numbers = self._session_numbers
        self._sessions.append(-1 if session is None else numbers.setdefault(session, len(numbers)))
        self._num_runs.append(len(self._starts) - before)

    def finish(self, block_size: int) -> _core.Trace:
        """The trace: sorted by arrival, its first request at 0 seconds, its blocks numbered densely.

        Args:
            block_size: tokens a block.

        Raises:
            TraceError: a request is impossible; the message names its line.
        """
        if not self._lines:
            raise TraceError(f"{self.path}: holds no request")
        arrivals = np.array(self._arrivals, np.float64)
        order = np.argsort(arrivals, kind="stable")
        num_runs = np.array(self._num_runs, np.int64)
        starts, lengths = _numbers(self._starts), _numbers(self._lengths)
        if (np.diff(order) < 0).any():
            places = _gather(num_runs, order)
            starts, lengths, num_runs = starts[places], lengths[places], num_runs[order]
        prompts = np.array(self._prompts, np.int64)[order]
        # What a prompt cannot hold is refused below, and not unrolled here.
        if (_sums(lengths, num_runs) <= -(-prompts // block_size)).all() and prompts.max() <= MAX_SYMBOL:
            starts, lengths, num_runs = _densely_numbered(starts, lengths, num_runs)
        try:
            return _core.Trace(
                block_size=block_size,
                arrivals=arrivals[order] - arrivals[order[0]],
                prompt_tokens=prompts,
                output_tokens=np.array(self._outputs, np.int64)[order],
                sessions=np.array(self._sessions, np.int64)[order],
                num_runs=num_runs,
                run_starts=starts,
                run_lengths=lengths,
            )
        except TraceError as error:
            line = Line(self.path, self._lines[order[error.request or 0]])
            raise line.error(str(error)) from None


def _numbers(column: array[int]) -> np.ndarray:
    """The same memory; an empty column has none that is aligned."""
    return np.frombuffer(column, np.int64) if column else np.zeros(0, np.int64)


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sum of each group of `counts` values; as reals, which do not overflow."""
    total: np.ndarray = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    ends = np.cumsum(counts)
    sums: np.ndarray = total[ends] - total[ends - counts]
    return sums


def _gather(counts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The indices of entries that belong to requests in groups of `counts`, in another order of the requests."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    return _ranges(starts[order], counts[order])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of all ranges, one range after the other."""
    ends = np.cumsum(lengths)
    numbers: np.ndarray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        starts - (ends - lengths), lengths
    )
    return numbers


def _densely_numbered(
    starts: np.ndarray, lengths: np.ndarray, num_runs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Other numbers for the same blocks, where they leave large gaps (as hashes do)."""
    if not len(starts) or lengths.min() < 1 or lengths.max() > MAX_SYMBOL:
        return starts, lengths, num_runs
    highest = min(2 * int(lengths.sum()) + 1024, MAX_SYMBOL)
    if starts.min() >= 0 and starts.max() <= highest:
        return starts, lengths, num_runs
    _, first, numbers = np.unique(_ranges(starts, lengths), return_index=True, return_inverse=True)
    # By first appearance, so that blocks that follow each other get numbers that do.
    numbers = np.argsort(np.argsort(first))[numbers]
    request = np.repeat(np.repeat(np.arange(len(num_runs)), num_runs), lengths)
    begins = np.flatnonzero((np.diff(numbers, prepend=-9) != 1) | (np.diff(request, prepend=-1) != 0))
    per_request = np.bincount(request[begins], minlength=len(num_runs))
    return numbers[begins], np.diff(begins, append=len(numbers)), per_request


def runs_of(blocks: list[int]) -> Iterator[list[int]]:
    """Numbers as runs of those that follow each other."""
    run: list[int] = []
    for block in blocks:
        if run and block == run[0] + run[1]:
            run[1] += 1
            continue
        if run:
            yield run
        run = [block, 1]
    if run:
        yield run
