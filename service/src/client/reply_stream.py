"""One call's HTTP/2 stream, bounded in what it receives."""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from grpclib.const import Status
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import Buffer, Connection, EventsProcessor, Stream
from grpclib.utils import Wrapper
from h2.connection import H2Connection

from pykv.service.client.failures import ConnectionEndedError, ServiceError
from pykv.service.client.reply_buffer import ReplyBuffer
from pykv.service.client.reply_headers import STATUS_KEY, Headers
from pykv.service.client.tls_failures import Reason

if TYPE_CHECKING:
    from pykv.service.client.events import ReplyEvents

__all__ = ["STREAM_WINDOW_BYTES", "ReplyStream"]

STREAM_WINDOW_BYTES = 256 * 1024
"""So much of a call may be on its way or unread, beside the message that is waited for."""

PREFIX = struct.Struct(">BI")  # of each gRPC message: a flag for compression, the length in bytes


class ReplyStream(Stream):
    """A stream that refuses a message by its announced length, and whose end ends its call, whatever was missing.

    The server may send more once what it sent was read. A message that is waited for counts as read, so that it may be
    larger than the window.

    Args:
        max_message_bytes: size of a received message.
    """

    def __init__(
        self, connection: Connection, h2: H2Connection, max_message_bytes: int, wrapper: Wrapper | None
    ) -> None:
        super().__init__(connection, h2, connection._transport, wrapper=wrapper)
        self._max_message_bytes = max_message_bytes
        self._awaits_prefix = True
        self._received = ReplyBuffer()

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        """Sets what a stream has once its id is known: a buffer that gives no window back by itself."""
        super().init_stream(stream_id, connection)
        self.buffer = cast(Buffer, self._received)

    async def send_request(
        self, headers: Headers, end_stream: bool = False, *, _processor: EventsProcessor
    ) -> Callable[[], None]:
        """Begins the call, once the server lets one more begin; it ends with its connection before that too."""
        waiting = cast("ReplyEvents", _processor).waiting
        waiting.add(self)
        try:
            return await super().send_request(headers, end_stream, _processor=_processor)
        finally:
            waiting.discard(self)

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Sends the request as the server's windows let it, unless it has answered: then the rest is not sent."""
        rest, stream_id = memoryview(data), cast(int, self.id)
        while True:
            await self.connection.write_ready.wait()
            if self._received.has_ended:
                return
            window = self._h2_connection.local_flow_control_window(stream_id)
            if window <= 0:  # settings may take it below 0
                self.window_updated.clear()
                await self.window_updated.wait()
                continue
            size = min(window, self._h2_connection.max_outbound_frame_size, len(rest))
            part, rest = rest[:size], rest[size:]
            self._h2_connection.send_data(stream_id, bytes(part), end_stream=end_stream and not rest)
            self.connection.flush()
            self.data_sent += size
            self.connection.data_sent += size
            self.connection.data_send_process()
            if not rest:
                return

    async def recv_headers(self) -> Headers:
        """The headers of the answer.

        Raises:
            ServiceError: the call ended without any.
        """
        await self.headers_received.wait()
        if self.headers is None:
            raise _broken("the server ended the call without headers")
        return self.headers

    async def recv_trailers(self) -> Headers:
        """The trailers of the answer.

        Raises:
            ServiceError: the call ended without any.
        """
        await self.trailers_received.wait()
        if self.trailers is None:
            raise ServiceError("the server ended the call without a status", Status.UNKNOWN.name)
        return self.trailers

    async def recv_data(self, size: int) -> bytes:
        """Reads `size` bytes: of a prefix and of a message, in turn. No bytes at the end of the answer.

        Raises:
            ServiceError: the message is compressed or over the limit.
            StreamTerminatedError: it ends too early.
        """
        received = self._received
        while len(received) < size and not received.has_ended:
            self._open_window(num_kept=0)
            await received.wait()
        data = received.take(size)
        self._open_window(num_kept=len(received))
        if len(data) < size and (data or not self._awaits_prefix):
            raise StreamTerminatedError("the stream ended inside a message")
        if self._awaits_prefix and data:
            self._check_prefix(data)
        self._awaits_prefix = not self._awaits_prefix
        return data

    def fail(self, error: Exception) -> None:
        """Ends the call with this error, on both sides."""
        if self.wrapper is not None and self.wrapper._error is None:
            self.wrapper.cancel(error)

    def __ended__(self) -> None:
        """Nothing more comes, on any of what may be waited for."""
        super().__ended__()
        self.headers_received.set()
        self.trailers_received.set()
        self.window_updated.set()

    def __terminated__(self, reason: str) -> None:
        """Ends the call, unless all of its answer is there; the first reason stands."""
        self.terminate(Reason(reason))

    def terminate(self, reason: Reason) -> None:
        """The same, with what of TLS may be the matter."""
        if not (self._received.has_ended and self._has_status):
            self.fail(ConnectionEndedError(reason))

    @property
    def _has_status(self) -> bool:
        return self.trailers is not None or any(name == STATUS_KEY for name, _ in self.headers or ())

    def _open_window(self, num_kept: int) -> None:
        """Lets the server send as much more as was read, once that is worth a frame."""
        num_bytes = self._received.due(num_kept)
        if num_bytes < STREAM_WINDOW_BYTES // 4 or self._received.has_ended or not self.closable:
            return
        self._received.told(num_bytes)
        self._h2_connection.increment_flow_control_window(num_bytes, self.id)
        self.connection.flush()

    def _check_prefix(self, prefix: bytes) -> None:
        flag, num_bytes = PREFIX.unpack(prefix)
        if flag:
            what = "a compressed message" if flag == 1 else f"a message of the unknown flag {flag}"
            raise _broken(f"the server sent {what}: allowed are messages that are not compressed, flag 0")
        if num_bytes > self._max_message_bytes:
            message = f"the server announced a message of {num_bytes} bytes"
            allowed = f"allowed is max_message_bytes, {self._max_message_bytes}"
            raise ServiceError(f"{message}: {allowed}", Status.RESOURCE_EXHAUSTED.name)


def _broken(problem: str) -> ServiceError:
    return ServiceError(problem, Status.INTERNAL.name)
