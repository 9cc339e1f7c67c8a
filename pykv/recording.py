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

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pykv import _core
from pykv.errors import RecordingError
from pykv.field_checks import as_boolean, as_path

__all__ = ["Recording", "ReplayedRecording", "replay_recording"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayedRecording:
    """A recording whose every call decided as it did when it was recorded.

    Attributes:
        num_calls: calls that were made again.
        num_plans: those of them that planned a step.
        is_cut: whether the recording has no end, so that more calls may have been made.
    """

    num_calls: int
    num_plans: int
    is_cut: bool = False


class Recording:
    """An open recording of a scheduler; ends with `close`, or with the `with` block, from any thread.

    The file is written in chunks of about 1 MiB, by the scheduler's `plan`. A recording that cannot be written any
    further stops and hurts no call: `close` says so. Like one that was never closed, it has no end, and can be replayed
    as far as its last whole chunk (`replay_recording(path, allow_cut=True)`).

    Raises:
        RecordingError: the scheduler was used already, for a recording must see every call; it is being recorded; or
            `path` is no path. No file was touched.
        OSError: the file cannot be written.
    """

    def __init__(self, native: _core.Scheduler, path: str | os.PathLike[str]) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        path = Path(as_path("path", path))
        if not native.start_recording():
            raise RecordingError(
                "the scheduler was used already, or is being recorded: a recording starts before the first call"
            )
        try:
            # Without a buffer: what was written is in the file, whatever becomes of this process.
            self._file = path.open("wb", buffering=0)
            try:
                self._write(native.take_recording(0))
            except BaseException:
                self._file.close()
                raise
        except BaseException:
            native.stop_recording()
            raise

    def write_pending(self, at_least: int = _CHUNK_BYTES) -> None:
        """Writes what was recorded since the last time, if it is at least so many bytes. Raises nothing."""
        if not self._lock.acquire(blocking=False):
            # Another thread writes, or closes, which writes all.
            return
        try:
            if not self._file.closed:
                self._write_or_stop(lambda: self._native.take_recording(at_least))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Writes the rest and the end, and ends the recording; a second call does nothing.

        Raises:
            RecordingError: the recording stopped because it could not be written; its cause is the error. The file is
                cut: it has no end.
        """
        with self._lock:
            if not self._file.closed:
                self._write_or_stop(self._native.finish_recording, is_last=True)
            error, self._error = self._error, None
        if error is not None:
            raise RecordingError(
                f"the recording stopped early and has no end, for it could not be written: {error}"
            ) from error

    @property
    def closed(self) -> bool:
        """Whether the recording has ended."""
        return self._file.closed

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RecordingError as stopped:
            if error is None:
                raise
            error.add_note(str(stopped))

    def _write_or_stop(self, take: Callable[[], bytes | None], *, is_last: bool = False) -> None:
        """Writes what `take` gives. If that fails, the recording is over and the error is kept for `close`."""
        try:
            self._write(take())
            if is_last:
                self._file.close()
        except BaseException as error:
            self._error = error
            self._native.stop_recording()
            with contextlib.suppress(OSError):
                self._file.close()
            if not isinstance(error, Exception):
                raise

    def _write(self, chunk: bytes | None) -> None:
        rest = memoryview(chunk or b"")
        while rest:
            rest = rest[self._file.write(rest) :]


def replay_recording(path: str | os.PathLike[str], *, allow_cut: bool = False) -> ReplayedRecording:
    """Makes the calls of a recording again, on a new scheduler, and compares every decision.

    Args:
        path: the file.
        allow_cut: whether the recording may have no end, as a process leaves it that died: it is replayed up to the
            first chunk that is not whole, and `is_cut` of the result says so. Else such a file is refused. One with
            more behind that chunk was damaged, and is refused in any case.

    Raises:
        RecordingError: the file is no recording, of another version's format, damaged, or cut and that is not allowed;
            or a call decided otherwise: the message says where or which.
        OSError: the file cannot be read.
    """
    path, allow_cut = Path(as_path("path", path)), as_boolean("allow_cut", allow_cut, RecordingError)
    num_calls, num_plans, is_cut = _core.replay_recording(path.read_bytes(), allow_cut)
    return ReplayedRecording(num_calls, num_plans, is_cut)
