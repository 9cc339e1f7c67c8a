"""A scheduler's run as a file, and the same run again: a report of a fault that anybody can replay.

>>> import tempfile, pathlib
>>> from pykv.scheduler import Scheduler, SchedulerConfig
>>> path = pathlib.Path(tempfile.mkdtemp()) / "run.pykv"
>>> scheduler = Scheduler(SchedulerConfig(num_blocks=64))
>>> with scheduler.record(path):
...     _ = scheduler.submit([7, 8, 9], max_tokens=2)
>>> replay_recording(path).num_calls
1
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pykv import _core
from pykv.errors import RecordingError
from pykv.field_checks import as_path

__all__ = ["Recording", "ReplayedRecording", "replay_recording"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayedRecording:
    """A recording whose every call decided as it did when it was recorded.

    Attributes:
        num_calls: calls that were made again.
        num_plans: those of them that planned a step.
    """

    num_calls: int
    num_plans: int


class Recording:
    """An open recording of a scheduler; ends with `close`, or with the `with` block.

    Raises:
        RecordingError: the scheduler was used already, for a recording must see every call; it is being recorded; or
            `path` is no path. No file was touched.
        OSError: the file cannot be written.
    """

    def __init__(self, native: _core.Scheduler, path: str | os.PathLike[str]) -> None:
        self._native = native
        path = Path(as_path("path", path))
        if not native.start_recording():
            raise RecordingError(
                "the scheduler was used already, or is being recorded: a recording starts before the first call"
            )
        try:
            self._file = path.open("wb")
        except BaseException:
            native.stop_recording()
            raise

    def write_pending(self, at_least: int = _CHUNK_BYTES) -> None:
        """Writes what was recorded since the last time, if it is at least so many bytes."""
        if chunk := self._native.take_recording(at_least):
            self._file.write(chunk)

    def close(self) -> None:
        """Writes the rest and ends the recording; a second call does nothing."""
        if not self._file.closed:
            self.write_pending(at_least=0)
            self._native.stop_recording()
            self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return self._file.closed

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def replay_recording(path: str | os.PathLike[str]) -> ReplayedRecording:
    """Makes the calls of a recording again, on a new scheduler, and compares every decision.

    Raises:
        RecordingError: the file is no recording, ends within a call, or a call decided otherwise: the message says
            which.
        OSError: the file cannot be read.
    """
    num_calls, num_plans = _core.replay_recording(Path(as_path("path", path)).read_bytes())
    return ReplayedRecording(num_calls, num_plans)
