"""Lines of the log that clients can cause in floods: of each kind one at once, then a count a second."""

import asyncio
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

__all__ = ["BoundedLog"]

COUNT_SECONDS = 1.0

log = structlog.get_logger("pykv.service")


class _Kind(NamedTuple):
    level: str
    event: str
    labels: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Repeats:
    """How many lines of one kind were counted, not written, since the last one."""

    timer: asyncio.TimerHandle
    count: int = field(default=0)


class BoundedLog:
    """Writes the first line of a kind, and for those that follow one line a second with their number.

    A kind is known by its level, its event and its labels; the labels must be of few values.
    """

    def __init__(self) -> None:
        self._repeats: dict[_Kind, _Repeats] = {}

    def write(self, level: str, event: str, labels: Mapping[str, str], **details: Any) -> None:
        """Writes or counts one line.

        Args:
            level: a method of the logger, such as "info".
            labels: told in each line of this kind.
            details: told where the line is written by itself.
        """
        kind = _Kind(level, event, tuple(labels.items()))
        repeats = self._repeats.get(kind)
        if repeats is not None:
            repeats.count += 1
            return
        self._repeats[kind] = _Repeats(self._count_later(kind))
        getattr(log, level)(event, **labels, **details)

    def close(self) -> None:
        """Writes what was counted and not yet told."""
        for kind, repeats in self._repeats.items():
            repeats.timer.cancel()
            self._tell(kind, repeats.count)
        self._repeats.clear()

    def _count_later(self, kind: _Kind) -> asyncio.TimerHandle:
        """A timer without a context: what one call has bound to its lines says nothing of the others."""
        loop = asyncio.get_running_loop()
        return loop.call_later(COUNT_SECONDS, self._end_count, kind, context=Context())

    def _end_count(self, kind: _Kind) -> None:
        count = self._repeats.pop(kind).count
        if count:
            self._tell(kind, count)
            self._repeats[kind] = _Repeats(self._count_later(kind))

    def _tell(self, kind: _Kind, count: int) -> None:
        if count:
            getattr(log, kind.level)(kind.event, **dict(kind.labels), repeated=count)
