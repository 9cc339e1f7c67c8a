"""The tasks of one connection's calls."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from grpclib.const import Handler as GrpcHandler
from grpclib.encoding.base import CodecBase, StatusDetailsCodecBase
from grpclib.events import _DispatchServerEvents
from grpclib.metadata import decode_timeout
from grpclib.protocol import Stream
from grpclib.server import Handler

from pykv.service.transport.codec import StrictCodec
from pykv.service.transport.limits import MethodLimits
from pykv.service.transport.stream import BoundedStream

__all__ = ["CallHandler"]

TIMEOUT_HEADER = "grpc-timeout"

Headers = list[tuple[str, str]]


class CallHandler(Handler):
    """Runs a task for each call; when it ends, however it does, its stream is released and nothing of it is kept.

    Args:
        limits_of: the bounds of a method, by its path.
    """

    def __init__(
        self,
        mapping: dict[str, GrpcHandler],
        codec: CodecBase,
        status_details_codec: StatusDetailsCodecBase | None,
        dispatch: _DispatchServerEvents,
        limits_of: Callable[[str], MethodLimits],
    ) -> None:
        super().__init__(mapping, codec, status_details_codec, dispatch)
        self.limits_of = limits_of

    def __gc_step__(self) -> None:
        """Does nothing: grpclib would sweep out the calls that have ended at every tenth that begins."""

    def count_bad_messages(self, count: Callable[[float], None]) -> None:
        """Has messages that are none counted from now on."""
        if isinstance(self.codec, StrictCodec):
            self.codec = self.codec.counting(count)

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], object]) -> None:
        """Begins a call.

        The stream is released when the task is done, even if it was cancelled before its first step: a reset
        that arrives together with its request would otherwise keep its part of the connection's window.
        """
        release = _Once(release_stream)
        if isinstance(stream, BoundedStream):
            stream.timeout_seconds, headers = _take_timeout(headers)
            path = _path_of(headers)
            stream.has_one_message = not self.has_many_messages(path)
            stream.max_message_bytes, stream.is_queued = self.limits_of(path)
        super().accept(stream, headers, release)
        task = self._tasks[stream]
        task.add_done_callback(release)
        task.add_done_callback(partial(self._forget, stream))

    def has_many_messages(self, path: str) -> bool:
        """Whether the requests of a method are streams of messages."""
        return bool(self.mapping[path].cardinality.client_streaming)

    def cancel(self, stream: Stream) -> bool:  # type: ignore[override]
        """Cancels a call whose stream was reset, and returns whether it still ran."""
        runs = stream in self._tasks
        if runs:
            super().cancel(stream)
        return runs

    def _forget(self, stream: Stream, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)


class _Once:
    """Calls a function the first time only."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self, *_: object) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def _take_timeout(headers: Sequence[tuple[str, str]]) -> tuple[float | None, Headers]:
    """Parts the timeout, which is known to be well-formed, from the other headers."""
    timeouts = [decode_timeout(value) for name, value in headers if name == TIMEOUT_HEADER]
    others = [(name, value) for name, value in headers if name != TIMEOUT_HEADER]
    return min(timeouts, default=None), others


def _path_of(headers: Headers) -> str:
    return next(value for name, value in headers if name == ":path")
