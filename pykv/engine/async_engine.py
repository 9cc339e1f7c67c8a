"""The asynchronous engine: one thread that steps, and any number of streams."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from pykv.engine.cache_use import NO_RETENTION, CacheUse
from pykv.engine.config import MOST_PENDING_TOKENS
from pykv.engine.delivery import Delivery
from pykv.engine.delta_stream import Channel, DeltaStream
from pykv.engine.deltas import RequestDelta, raised_within
from pykv.engine.encoding_threads import EncodingThreads
from pykv.engine.engine import Engine
from pykv.engine.engine_thread import EngineThread
from pykv.engine.request import Request
from pykv.engine.stats import EngineStats
from pykv.engine.timing import TimingCounts
from pykv.errors import ConfigError, EngineDeadError, InvalidRequestError, StepError
from pykv.events import KvEvents
from pykv.field_checks import (
    as_bytes,
    as_callable,
    as_integer,
    as_text,
    duplicate_request,
    instance_of,
    optional,
)
from pykv.retention import Pin, Retention
from pykv.sampling.params import SamplingParams
from pykv.text.chat import num_characters

_CLOSING_SECONDS = 30.0
_CLOSED = "the engine was closed"
_CHARACTERS_OF_MESSAGE = 64  # so much more text would take the memory that a message takes beside its own
_log = logging.getLogger("pykv.engine")


@dataclass(frozen=True, slots=True)
class _Call:
    """What one stream asks for.

    Attributes:
        num_characters: of its texts; 0 for ids.
        amount: what counts of it while it waits to be encoded: characters or ids, and some for each message.
    """

    new_request: Callable[[str], Request]
    num_characters: int
    amount: int
    params: SamplingParams
    request_id: str | None
    use: CacheUse


class AsyncEngine:
    """Serves streams with an engine, which it steps on a thread of its own.

        async with AsyncEngine(Engine("bundled")) as engine:
            async for delta in engine.generate("The capital of France is", SamplingParams(max_tokens=5)):
                print(delta.text, end="")

    Its methods may be called from any event loop. Prompts are encoded on threads; of those that wait for it,
    2**24 characters or token ids are kept at most, and a tenant may have as much of that as is left to all.

    Args:
        engine: nothing else may use it from now on; it is closed with this one.
        max_pending_tokens: a stream whose reader is more tokens behind is paused: no more are made until it has read
            half of them, and its blocks go to others first.

    Raises:
        ConfigError: an argument is not of its type or out of its range.
    """

    def __init__(self, engine: Engine, *, max_pending_tokens: int = 2**10) -> None:
        self.engine = instance_of("engine", engine, Engine, ConfigError)
        self._max_pending_tokens = as_integer(
            "max_pending_tokens", max_pending_tokens, 1, MOST_PENDING_TOKENS, ConfigError
        )
        self._live: dict[str, Channel] = {}
        self._unended: set[Channel] = set()  # those that were submitted and have not been handed their end
        self._delivery = Delivery(self._lose)
        self._thread = EngineThread(engine.steps, self._deliver, self._end)
        self._encoding = EncodingThreads()
        self._started = False
        self._refusal: str | None = None
        self._error: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive and self._refusal is None

    @property
    def last_progress(self) -> float:
        """When the last step ended, on the monotonic clock, in seconds; now, while there is nothing to do."""
        return self._thread.last_progress

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread, if it did not end as it should."""
        return self._error

    def start(self) -> None:
        """Starts the thread.

        Raises:
            StepError: it was started before.
        """
        if self._started:
            raise StepError("the engine was started before")
        self._started = True
        self._thread.start()

    async def aclose(self) -> None:
        """Ends all requests, whose streams get their last deltas, and the thread."""
        self._refusal = self._refusal or _CLOSED
        if self._started:
            self._thread.stop()
            if not await asyncio.to_thread(self._thread.join, _CLOSING_SECONDS):
                _log.error("the engine's thread did not end within %g seconds", _CLOSING_SECONDS)
                return
        self._encoding.shut_down()
        if self._error is None:
            self.engine.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def timing(self) -> TimingCounts:
        """Returns what was measured so far of waits, tokens and stalls."""
        return self.engine.steps.timing.counts()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: bytes = b"",
        tenant: bytes = b"",
        retention: Retention = NO_RETENTION,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> DeltaStream:
        """Streams the continuation of a prompt.

        The request begins when the first delta is asked for. Leaving the stream early, for any reason, ends it.

        Args:
            prompt: a text or token ids.
            request_id: for `abort`; must not be that of a live request. None = drawn.
            scope: requests of different scopes share no cached blocks.
            tenant: whose sessions and share of the cache count, and who pays under "fair_share".
            retention: how long its blocks matter, such as `Retention(session_id="chat 7")`.
            media: what its placeholder tokens stand for, as `Scheduler.submit` takes it.

        Raises (when the first delta is asked for):
            InvalidRequestError, CapacityError: the prompt or the parameters are not allowed, or can never fit.
            DuplicateRequestError, QueueFullError: the id is taken, the queue is full or too much waits to be encoded.
            EngineDeadError: also later: the engine has ended.
        """

        def new_request(name: str) -> Request:
            return self.engine.new_request(prompt, params, name)

        use = CacheUse(scope=scope, tenant=tenant, retention=retention, media=media)
        return self._stream(
            _Call(new_request, _num_characters(prompt), _amount(prompt), params, request_id, use)
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: bytes = b"",
        tenant: bytes = b"",
        retention: Retention = NO_RETENTION,
        template_options: Mapping[str, Any] | None = None,
    ) -> DeltaStream:
        """Streams the answer to a chat: messages with `role` and `content`; otherwise as `generate`."""

        def new_request(name: str) -> Request:
            return self.engine.new_request(self.engine.encode_chat(messages, template_options), params, name)

        use = CacheUse(scope=scope, tenant=tenant, retention=retention)
        length = num_characters(messages)
        amount = length + _CHARACTERS_OF_MESSAGE * _amount(messages)
        return self._stream(_Call(new_request, length, amount, params, request_id, use))

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets a last delta with finish reason "abort".

        The id may be used again at once.

        Returns:
            False where no live request has this id.

        Raises:
            InvalidRequestError: the id is no text.
        """
        channel = self._live.get(as_text("request_id", request_id))
        if channel is None:
            return False
        self._forget(channel)
        channel.is_aborted = True  # heeded when it is submitted, if that is still to come
        if channel.request is not None:
            self._thread.abort(channel.request)
        return True

    def end_session(self, session_id: bytes | str, *, tenant: bytes = b"") -> bool:
        """Says that a session has no further turn; see `Engine.end_session`."""
        return self.engine.end_session(session_id, tenant=tenant)

    async def pin(
        self, prompt: str | Sequence[int], *, scope: bytes = b"", tenant: bytes = b""
    ) -> Pin | None:
        """Keeps the cached blocks that a prompt begins with; see `Engine.pin`. Encodes on a thread.

        Raises:
            QueueFullError: too much waits to be encoded; nothing was pinned.
        """
        pin = partial(self.engine.pin, prompt, scope=scope, tenant=tenant)
        return await self._encoding.run(pin, tenant=as_bytes("tenant", tenant), amount=_amount(prompt))

    def unpin(self, pin: Pin) -> bool:
        """Gives a pin up. Returns whether it still was one."""
        return self.engine.unpin(pin)

    def set_cache_share(self, tenant: bytes, share: float) -> None:
        """Sets a tenant's share of the cache; see `Engine.set_cache_share`."""
        self.engine.set_cache_share(tenant, share)

    def listen_to_events(self, listener: Callable[[KvEvents], None] | None) -> int:
        """Sets who is told what happens to cached blocks: one listener, or None. What waits to be taken is dropped.

        It is called on the engine's thread behind each step in which something has happened, with all of it since the
        last call, so it must hand the events on at once and not raise. While there is none nothing is taken, and beyond
        `max_kv_events` the oldest are dropped.

        Returns:
            The number of the first event that the listener is told; `snapshot_events` has those before it.

        Raises:
            InvalidRequestError: the listener cannot be called; nothing was changed.
        """
        optional(as_callable, "listener", listener)
        dropped = self.engine.take_events()
        self._thread.event_listener = listener
        return dropped.sequence + len(dropped)

    def snapshot_events(self) -> KvEvents:
        """Returns all cached blocks as if each had just been stored; see `Scheduler.snapshot_events`."""
        return self.engine.snapshot_events()

    def stats(self) -> EngineStats:
        """Returns the counters and gauges as they are now."""
        return self.engine.stats()

    def _stream(self, call: _Call) -> DeltaStream:
        return DeltaStream(lambda: self._open(call), self._abandon)

    async def _open(self, call: _Call) -> Channel:
        """Reserves the id and a place in the queue, checks and encodes on a thread, submits."""
        self._check_serving()
        instance_of("params", call.params, SamplingParams, InvalidRequestError)
        optional(as_text, "request_id", call.request_id)
        tenant = as_bytes("tenant", call.use.tenant)
        self.engine.check_characters(call.num_characters)
        with self.engine.steps.preparing(call.params.n):
            loop = asyncio.get_running_loop()
            name = uuid.uuid4().hex if call.request_id is None else call.request_id
            channel = Channel(name, loop, self._max_pending_tokens, self._pause_or_resume)
            if self._live.setdefault(name, channel) is not channel:
                raise duplicate_request(name)
            try:
                request = await self._encoding.run(
                    partial(call.new_request, name),
                    tenant=tenant,
                    amount=call.amount,
                )
                self._submit(request, channel, call)
            except BaseException:
                self._unended.discard(channel)
                channel.leave()
                self._abandon(channel)
                raise
        self._thread.wake()  # now that it is no more among those that are waited for
        return channel

    def _submit(self, request: Request, channel: Channel, call: _Call) -> None:
        request.receiver = channel
        self._check_serving()
        self._unended.add(channel)
        self.engine.steps.submit(request, call.use)
        channel.request = request
        channel.prompt_token_ids = request.prompt
        self._check_serving()  # the thread may have ended meanwhile, and told only those that it knew
        if channel.is_aborted:
            self._thread.abort(request)

    def _check_serving(self) -> None:
        if not self._started:
            raise StepError("the engine was not started; enter it with `async with`, or call start")
        if self._refusal is not None:
            raise EngineDeadError(self._refusal) from self._error

    def _abandon(self, channel: Channel) -> None:
        """Ends the request of a stream that nobody reads any more; takes no lock, since finalizers call it.

        What the engine makes until then goes to the channel all the same, which may have to measure it.
        """
        self._forget(channel)
        if channel.request is not None:
            self._thread.abort(channel.request)

    def _lose(self, channel: Channel) -> None:
        """Ends the request of a stream whose event loop is closed: nothing can be handed to it any more."""
        if channel.request is not None:
            channel.request.receiver = None
        self._unended.discard(channel)
        self._abandon(channel)

    def _pause_or_resume(self, channel: Channel) -> None:
        """Has a request follow its reader."""
        if channel.request is None:
            return
        if channel.is_paused:
            self._thread.pause(channel.request)
        else:
            self._thread.resume(channel.request)

    def _forget(self, channel: Channel) -> None:
        """Frees the id of a channel."""
        if self._live.get(channel.request_id) is channel:
            del self._live[channel.request_id]

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        """Runs on the engine's thread."""
        received = [(request.receiver, delta) for request, delta in deltas]
        items = [(channel, delta) for channel, delta in received if channel is not None]
        for channel, delta in items:
            if delta.usage is not None:
                self._unended.discard(channel)
                self._forget(channel)
        self._delivery.send(items)

    def _end(self, error: BaseException | None) -> None:
        """Runs on the engine's thread when it ends: nobody waits for it any more."""
        if error is not None:
            _log.error("the engine has ended", exc_info=error)
            self._error = error
            self._refusal = f"the engine has ended: {raised_within(error)}"
        refusal = self._refusal or _CLOSED
        # More than the requests that live: those that ended in a step which raised were told nothing of it.
        self._delivery.send((channel, EngineDeadError(refusal)) for channel in list(self._unended))


def _num_characters(prompt: object) -> int:
    """Of a text; token ids are none."""
    return len(prompt) if isinstance(prompt, str) else 0


def _amount(prompt: object) -> int:
    """How much there is to encode or to check: characters or token ids."""
    if isinstance(prompt, np.ndarray):
        return prompt.size
    return len(prompt) if isinstance(prompt, Sequence) else 0
