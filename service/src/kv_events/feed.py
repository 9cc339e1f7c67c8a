"""From the engine's thread to any number of subscribers, none of whom the engine waits for.

Batches are numbered. A subscriber begins with a snapshot, which has the number of the last batch that it may stand for:
the batches after it repeat, at most, what the snapshot has already, and end in the same state. One who reads too slowly
loses batches and gets a snapshot in their place.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.to_thread

from pykv.events import KvEvents
from pykv.service.errors import NotServedError

__all__ = ["Batch", "EventFeed", "Subscription"]

MOST_PENDING_EVENTS = 2**16
"""Events that wait for one subscriber, or for the event loop; more are lost."""


class EventSource(Protocol):
    """An engine."""

    def listen_to_events(self, listener: Callable[[KvEvents], None] | None) -> int:
        """Sets who is called, on the engine's thread, behind each step that did something to cached blocks.

        Returns:
            The number of the first event that it is told.
        """

    def snapshot_events(self) -> KvEvents:
        """All cached blocks as if each had just been stored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step did to cached blocks.

    Attributes:
        number: one more than that of the batch before; otherwise batches were lost.
        timestamp: when it was taken, in seconds since 1970.
        events: in their order.
        is_snapshot: whether it is all that can be found, in place of all that was known before.
    """

    number: int
    timestamp: float
    events: KvEvents
    is_snapshot: bool = False


class EventFeed:
    """Hands the batches of one engine to its subscribers; while there are none, the engine is not listened to.

    Its methods are called on one event loop.

    Args:
        is_kept: whether the engine keeps events at all.
    """

    def __init__(self, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._source: EventSource | None = None
        self._subscriptions: set[Subscription] = set()
        self._inbox: _Inbox | None = None
        # Of another range than those of a process that ended before: a cursor from there is none here.
        self._number = int(time.time() * 1e6)
        self._expected_event = 0
        self._closed = False
        self._snapshotting = anyio.Lock()

    @property
    def number(self) -> int:
        """Of the last batch."""
        return self._number

    def serve(self, source: EventSource) -> None:
        """There is an engine."""
        self._source = source

    def close(self) -> None:
        """Ends all subscriptions."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.end()

    @contextmanager
    def subscribe(self, next_number: int = 0) -> Iterator["Subscription"]:
        """One subscription, until the block is left.

        Args:
            next_number: the number that the subscriber expects next; where that is not what comes next, it begins with
                a snapshot.

        Raises:
            NotServedError: the engine keeps no events.
        """
        source = self._kept_source()
        is_current = bool(self._subscriptions) and next_number == self._number + 1
        subscription = Subscription(self, is_current)
        if not self._subscriptions:
            self._inbox = _Inbox(asyncio.get_running_loop(), self._distribute)
            self._expected_event = source.listen_to_events(self._inbox.put)
        self._subscriptions.add(subscription)
        if self._closed:
            subscription.end()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if not self._subscriptions:
                source.listen_to_events(None)
                self._number += 1  # nobody saw what comes now

    async def snapshot(self) -> Batch:
        """All that can be found, numbered as the last batch; one at a time is taken, on a thread.

        Raises:
            NotServedError: the engine keeps no events.
        """
        source = self._kept_source()
        async with self._snapshotting:
            number = self._number
            events = await anyio.to_thread.run_sync(source.snapshot_events, abandon_on_cancel=True)
        return Batch(number, time.time(), events, is_snapshot=True)

    def _kept_source(self) -> EventSource:
        if self._source is None or not self._is_kept:
            raise NotServedError("cache events are not kept; pykv-serve keeps them with --max-kv-events")
        return self._source

    def _distribute(self, taken: list[KvEvents]) -> None:
        """Runs on the loop: numbers what the engine gave, and shows by a gap where some is missing."""
        now = time.time()
        for events in taken:
            self._number += 2 if events.sequence > self._expected_event else 1
            self._expected_event = events.sequence + len(events)
            batch = Batch(self._number, now, events)
            for subscription in self._subscriptions:
                subscription.put(batch)


class Subscription:
    """The batches of one subscriber that it has not taken yet.

    Args:
        is_current: whether it needs no snapshot to begin with.
    """

    def __init__(self, feed: EventFeed, is_current: bool) -> None:
        self._feed = feed
        self._batches: deque[Batch] = deque()
        self._num_pending = 0
        self._needs_snapshot = not is_current
        self._last = feed.number
        self._ended = False
        self._changed = anyio.Event()

    def put(self, batch: Batch) -> None:
        """Adds a batch, or forgets all that wait where they are too many, or where the batch shows a gap."""
        is_gap = batch.number != self._last + 1
        self._last = batch.number
        self._num_pending += len(batch.events)
        if is_gap or self._num_pending > MOST_PENDING_EVENTS:
            self._batches.clear()
            self._num_pending = 0
            self._needs_snapshot = True
        else:
            self._batches.append(batch)
        self._wake()

    def end(self) -> None:
        """No more batches come."""
        self._ended = True
        self._wake()

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches as they come, snapshots where some were lost."""
        while not self._ended:
            if self._needs_snapshot:
                self._needs_snapshot = False
                yield await self._snapshot()
            elif self._batches:
                batch = self._batches.popleft()
                self._num_pending -= len(batch.events)
                yield batch
            else:
                self._changed = anyio.Event()
                await self._changed.wait()

    async def _snapshot(self) -> Batch:
        snapshot = await self._feed.snapshot()
        while self._batches and self._batches[0].number <= snapshot.number:
            self._num_pending -= len(self._batches.popleft().events)
        return snapshot

    def _wake(self) -> None:
        self._changed.set()


class _Inbox:
    """What the engine's thread gave and the loop has not taken yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, distribute: Callable[[list[KvEvents]], None]) -> None:
        self._loop = loop
        self._distribute = distribute
        self._lock = threading.Lock()
        self._taken: list[KvEvents] = []
        self._num_events = 0

    def put(self, events: KvEvents) -> None:
        """Runs on the engine's thread."""
        with self._lock:
            if self._num_events > MOST_PENDING_EVENTS:
                return  # the gap between the events' own numbers tells
            is_scheduled = bool(self._taken)
            self._taken.append(events)
            self._num_events += len(events)
        if not is_scheduled:
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return  # the loop is closed, so nobody listens any more

    def _empty(self) -> None:
        with self._lock:
            taken, self._taken = self._taken, []
            self._num_events = 0
        self._distribute(taken)
