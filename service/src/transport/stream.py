"""One call's HTTP/2 stream, bounded in what it receives and in how long it waits for the client."""

import asyncio
import struct
from typing import TYPE_CHECKING

import anyio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import Buffer, Connection, Stream
from h2.connection import H2Connection

from pykv.service.errors import ClientTooSlowError
from pykv.service.transport.headers import NO_MESSAGE
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.writer import TickWriter

if TYPE_CHECKING:
    from pykv.service.transport.events import BoundedConnection

__all__ = ["BoundedStream", "UnfinishedMessages"]

MAX_MESSAGES_UNFINISHED = 4  # of the largest size, on one connection
PREFIX = struct.Struct(">BI")  # of each gRPC message: a flag for compression, the length in bytes


class UnfinishedMessages:
    """What one connection's calls hold of messages that are not complete.

    Their windows come back while they are read, so that those bound nothing.

    Attributes:
        num_bytes: in all.
    """

    def __init__(self, limits: TransportLimits) -> None:
        self._max_bytes = limits.max_message_bytes * MAX_MESSAGES_UNFINISHED
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that came.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED; there are too many now.
        """
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            message = f"unfinished messages of more than {self._max_bytes} bytes on this connection"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, message)


class BoundedStream(Stream):
    """A stream that refuses a message by its announced length, and that gives a stalled client up.

    Attributes:
        timeout_seconds: what the client gave the call, from its start; None = no limit.
        needs_message: whether a call without a request message is refused.
    """

    connection: "BoundedConnection"
    timeout_seconds: float | None = None
    needs_message = False

    def __init__(
        self,
        connection: Connection,
        h2_connection: H2Connection,
        writer: TickWriter,
        limits: TransportLimits,
        stream_id: int,
        unfinished: UnfinishedMessages,
    ) -> None:
        super().__init__(connection, h2_connection, writer.as_transport(), stream_id=stream_id)
        self._limits = limits
        self._unfinished = unfinished
        self._num_unfinished_bytes = 0
        self._awaits_prefix = True
        self._awaits_request = True
        self._request_due = asyncio.get_running_loop().time() + limits.request_seconds

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        """Sets what a stream has once its id is known: a buffer whose bytes are counted."""
        super().init_stream(stream_id, connection)
        self.buffer = Buffer(self._take)

    async def recv_data(self, size: int) -> bytes:
        """Reads `size` bytes: of a prefix and of a message, in turn.

        Raises:
            GRPCError: the message is missing, compressed, over the limit, or ends too early, or the connection holds
                too much of unfinished messages.
            ClientTooSlowError: it is the call's first message, and did not come within `request_seconds`.
        """
        try:
            data = await self._recv_part(size)
        except BaseException:
            self._release()
            raise
        if self._awaits_prefix:
            self._release()
        return data

    def _take(self, num_bytes: int) -> None:
        """Gives their window back and counts them."""
        assert self.id is not None  # set when the stream was made
        self.connection.ack(self.id, num_bytes)
        self._num_unfinished_bytes += num_bytes
        self._unfinished.add(num_bytes)

    def _release(self) -> None:
        self._unfinished.num_bytes -= self._num_unfinished_bytes
        self._num_unfinished_bytes = 0

    async def _recv_part(self, size: int) -> bytes:
        data = await self._read(size)
        if not data and self._awaits_prefix and self._awaits_request and self.needs_message:
            raise GRPCError(Status.INVALID_ARGUMENT, NO_MESSAGE)
        if self._awaits_prefix and data:
            self._check_prefix(data)
        elif len(data) != size and not self._awaits_prefix:
            raise _cut_short()
        self._awaits_request = self._awaits_request and self._awaits_prefix
        self._awaits_prefix = not self._awaits_prefix
        return data

    async def send_headers(self, headers: list[tuple[str, str]], end_stream: bool = False) -> None:
        """Sends headers or, as the last thing, the status."""
        await super().send_headers(headers, end_stream)
        if end_stream:
            self.connection.refusals.heed(dict(headers).get("grpc-status", ""))

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Sends `data`, and waits a bounded time for the client to take it.

        Raises:
            ClientTooSlowError: the client left no room for `stall_seconds`.
        """
        if self._has_room(len(data)):
            await super().send_data(data, end_stream)
            return
        try:
            with anyio.fail_after(self._limits.stall_seconds):
                await super().send_data(data, end_stream)
        except TimeoutError:
            seconds = self._limits.stall_seconds
            raise ClientTooSlowError(f"the client read nothing for {seconds:g} s") from None

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes go out without waiting."""
        assert self.id is not None  # set when the stream was made
        if not self.connection.write_ready.is_set():
            return False
        return self._h2_connection.local_flow_control_window(self.id) >= num_bytes

    async def _read(self, size: int) -> bytes:
        if not self._awaits_request:
            return await self._read_whole(size)
        try:
            async with asyncio.timeout_at(self._request_due):
                return await self._read_whole(size)
        except TimeoutError:
            seconds = self._limits.request_seconds
            raise ClientTooSlowError(f"the request message did not come within {seconds:g} s") from None

    async def _read_whole(self, size: int) -> bytes:
        try:
            return await super().recv_data(size)
        except AssertionError:  # grpclib's word for a stream that ended inside a message
            raise _cut_short() from None

    def _check_prefix(self, prefix: bytes) -> None:
        is_compressed, num_bytes = PREFIX.unpack(prefix)
        if is_compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not served")
        if num_bytes > self._limits.max_message_bytes:
            message = f"message of {num_bytes} bytes; allowed: {self._limits.max_message_bytes}"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, message)


def _cut_short() -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, "the message ends before its announced length")
