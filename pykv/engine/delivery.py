"""Takes deltas from the engine's thread to the event loops that wait for them: one wake a loop, not one a token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from pykv.engine.delta_stream import Channel
from pykv.engine.outputs import OutputDelta

Item = tuple[Channel, OutputDelta | Exception]


class Delivery:
    """One outbox for each event loop.

    Args:
        lost: called with a channel whose loop is closed.
    """

    def __init__(self, lost: Callable[[Channel], None]) -> None:
        self._lost = lost
        self._outboxes: dict[asyncio.AbstractEventLoop, _Outbox] = {}

    def send(self, items: Iterable[Item]) -> None:
        """Hands items to their channels, in their order; from one thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Item]] = {}
        for item in items:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, batch in by_loop.items():
            self._send_to(loop, batch)

    def _send_to(self, loop: asyncio.AbstractEventLoop, batch: list[Item]) -> None:
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = _Outbox(loop)
        if not outbox.put(batch):
            del self._outboxes[loop]
            for channel, _ in batch:
                self._lost(channel)


class _Outbox:
    """What one event loop has not been given yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._is_scheduled = False

    def put(self, batch: list[Item]) -> bool:
        """Adds items and wakes the loop unless that is under way; returns False where the loop is closed."""
        with self._lock:
            self._items += batch
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if is_scheduled:
            return True
        try:
            self._loop.call_soon_threadsafe(self._empty)
        except RuntimeError:
            return False
        return True

    def _empty(self) -> None:
        """Runs on the loop."""
        with self._lock:
            items, self._items = self._items, []
            self._is_scheduled = False
        for channel, item in items:
            if isinstance(item, Exception):
                channel.fail(item)
            else:
                channel.push(item)
