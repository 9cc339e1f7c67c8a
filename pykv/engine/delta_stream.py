"""One request's deltas on their way from the engine's thread to the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pykv.engine.merging import merged
from pykv.engine.outputs import OutputDelta

if TYPE_CHECKING:
    from pykv.engine.request import Request, TokenIds  # imports torch, which clients of the daemon do without


class Meter(Protocol):
    """Is told what the engine makes for one request, whether it is read or not. Called on the reader's event loop."""

    def begin(self, num_prompt_tokens: int) -> None:
        """The engine has taken the request; nothing was called before, and nothing is if it is refused."""

    def count(self, num_tokens: int) -> None:
        """So many tokens of output were made."""

    def end(self) -> None:
        """No more will be made: the request has ended in the engine, however it did. Called once."""


class Channel:
    """Holds what a reader has not taken yet: one bundle of deltas for each sample of the request.

    Its methods are called on the reader's event loop alone, but for `leave`.

    Attributes:
        request: once it was submitted.
        prompt_token_ids: once it was submitted.
        is_aborted: whether it was aborted by name.
        is_paused: whether the reader is so far behind that no more tokens should be made.

    Args:
        request_id: as the caller knows it.
        loop: the reader's event loop.
        max_pending_tokens: a reader that is further behind is waited for, until it has read half of that.
        on_pause: called whenever `is_paused` has changed.
    """

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        max_pending_tokens: int,
        on_pause: Callable[[Channel], object] = lambda channel: None,
    ) -> None:
        self.request_id = request_id
        self.loop = loop
        self.request: Request | None = None
        self.prompt_token_ids: TokenIds | Sequence[int] | None = None
        self.is_aborted = self.is_paused = False
        self._on_pause = on_pause
        self._max_pending_tokens = max_pending_tokens
        self._num_pending_tokens = 0
        self._pending: dict[int, list[OutputDelta]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._complete = self._is_left = False
        self._meter: Meter | None = None

    def measure(self, meter: Meter | None) -> None:
        """Tells the meter of all that comes from now on, until the request has ended; nothing may have come before."""
        self._meter = meter
        if meter is not None:
            meter.begin(0 if self.prompt_token_ids is None else len(self.prompt_token_ids))

    def push(self, delta: OutputDelta) -> None:
        """Takes one delta; what comes after an error, or once nobody reads any more, is measured and dropped."""
        if self._meter is not None and delta.token_ids:
            self._meter.count(len(delta.token_ids))
        if delta.usage is not None:
            self._end_measuring()
        if self._is_left:
            self._pending.clear()
        if self._is_left or self._error is not None:
            return
        self._num_pending_tokens += len(delta.token_ids)
        bundle = self._pending.pop(delta.index, [])
        bundle.append(delta)
        self._pending[delta.index] = bundle  # last, so that the delta with the usage is read last
        self._complete = self._complete or delta.usage is not None
        self._wake()
        if self._num_pending_tokens > self._max_pending_tokens:
            self._set_paused(not self._complete)

    def fail(self, error: Exception) -> None:
        """Makes the reader get this error after what it was given before; a complete channel stays as it is."""
        self._end_measuring()
        if not self._complete and self._error is None:
            self._error = error
        self._wake()

    async def take(self) -> OutputDelta | None:
        """Waits for the next delta; all that came for one sample meanwhile is one delta. None at the end.

        Raises:
            Exception: what `fail` was given.
        """
        while not self._pending:
            if self._complete:
                return None
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        delta = merged(self._pending.pop(next(iter(self._pending))))
        self._num_pending_tokens -= len(delta.token_ids)
        if self._num_pending_tokens <= self._max_pending_tokens // 2:
            self._set_paused(False)
        return delta

    def leave(self) -> None:
        """Nobody reads any more. May be called in a finalizer, on any thread."""
        self._is_left = True

    def stop_reading(self) -> None:
        """Makes a reader that waits get the end; what was pending is dropped. On the reader's loop."""
        self._complete = True
        self._pending.clear()
        self._wake()

    def _end_measuring(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.end()

    def _set_paused(self, is_paused: bool) -> None:
        if self.is_paused != is_paused:
            self.is_paused = is_paused
            self._on_pause(self)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class DeltaStream(AsyncGenerator[OutputDelta, None]):
    """The iterator that a caller reads.

    Leaving it early in any way (closing it, an error or a cancellation while it waits, dropping it) ends the request.

    Attributes:
        prompt_token_ids: once the engine has taken the request; None before, and for good if it refuses it.
        meter: is told what the engine makes, read or not; to be set before the first delta is asked for.

    Args:
        open_channel: called once, when the first delta is asked for; submits the request.
        abandon: called at most once, if the stream is left early; must be safe in a finalizer, on any thread.
    """

    def __init__(
        self, open_channel: Callable[[], Awaitable[Channel]], abandon: Callable[[Channel], None]
    ) -> None:
        self._open_channel: Callable[[], Awaitable[Channel]] | None = open_channel
        self.prompt_token_ids: TokenIds | Sequence[int] | None = None
        self.meter: Meter | None = None
        self._request: Request | None = None
        self._abandon = abandon
        self._channel: Channel | None = None
        self._ended = False

    @property
    def num_prompt_tokens(self) -> int | None:
        """How many `prompt_token_ids` there are; None as long as they are not known."""
        return None if self.prompt_token_ids is None else len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int | None:
        """How many tokens of the prompt were found in the cache; None before the first delta."""
        return None if self._request is None else self._request.num_cached_tokens

    @property
    def queue_seconds(self) -> float | None:
        """How long the request waited for the first step that computes for it; None as long as there was none."""
        request = self._request
        if request is None or request.started_at is None:
            return None
        return request.started_at - request.submitted_at

    async def __anext__(self) -> OutputDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            delta = await self._next()
        except BaseException:
            self._leave()
            raise
        if delta is None:
            self._ended, self._channel = True, None
            raise StopAsyncIteration
        return delta

    async def asend(self, value: None) -> OutputDelta:
        """The same as asking for the next delta."""
        return await self.__anext__()

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Leaves the stream, and raises what is given."""
        self._leave()
        raise kind

    async def aclose(self) -> None:
        """Leaves the stream; another task that waits for its next delta gets the end."""
        channel = self._channel
        self._leave()
        if channel is not None:
            channel.stop_reading()

    def __del__(self) -> None:
        self._leave()

    async def _next(self) -> OutputDelta | None:
        if self._open_channel is not None:
            opening, self._open_channel = self._open_channel, None
            channel = await opening()
            del opening  # it has the prompt, which would stay as long as the first delta is waited for
            self.prompt_token_ids = channel.prompt_token_ids
            self._request = channel.request
            channel.measure(self.meter)
            if self._ended:  # left meanwhile
                self._give_up(channel)
                return None
            self._channel = channel
        return None if self._channel is None else await self._channel.take()

    def _leave(self) -> None:
        channel, self._channel = self._channel, None
        self._ended, self._open_channel = True, None
        if channel is not None:
            self._give_up(channel)

    def _give_up(self, channel: Channel) -> None:
        channel.leave()
        self._abandon(channel)
