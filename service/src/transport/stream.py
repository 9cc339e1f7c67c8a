"""One call's HTTP/2 stream, bounded in what it receives and in how long it waits for the client."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import anyio
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import Buffer, Connection, Stream
from h2.connection import H2Connection

from pykv.service.errors import ClientTooSlowError
from pykv.service.transport.headers import NO_MESSAGE
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.message_buffer import MessageBuffer
from pykv.service.transport.request_memory import RequestMemory, Room
from pykv.service.transport.writer import TickWriter

if TYPE_CHECKING:
    from pykv.service.transport.events import BoundedConnection

__all__ = ["BoundedStream", "UnfinishedMessages"]

MAX_MESSAGES_UNFINISHED = 4  # of the largest size, on one connection
PREFIX = struct.Struct(">BI")  # of each gRPC message: a flag for compression, the length in bytes


class UnfinishedMessages:
    """What the messages that are not complete take of one connection, and of the memory of all.

    Attributes:
        num_bytes: of the connection's.
    """

    def __init__(self, limits: TransportLimits, memory: RequestMemory) -> None:
        self._max_bytes = limits.max_message_bytes * MAX_MESSAGES_UNFINISHED
        self._memory = memory
        self.num_bytes = 0

    async def take(self, room: Room) -> None:
        """Returns once there is room for a message.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED; this connection has too many.
        """
        if self.num_bytes + room.num_bytes > self._max_bytes:
            message = f"unfinished messages of more than {self._max_bytes} bytes on this connection"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, message)
        self.num_bytes += room.num_bytes
        try:
            await self._memory.take(room)
        except BaseException:
            self.num_bytes -= room.num_bytes
            raise

    def leave(self, room: Room) -> None:
        """The message is complete, or never will be."""
        self.num_bytes -= room.num_bytes
        self._memory.leave(room)


class BoundedStream(Stream):
    """A stream that refuses a message by its announced length, and that gives a stalled client up.

    Its window lets the start of a message in. For more it is opened once the method reads the message and there is
    room for all of it: a call that is refused by its headers takes nothing more.

    Attributes:
        timeout_seconds: what the client gave the call, from its start; None = no limit.
        needs_message: whether a call without a request message is refused.
        max_message_bytes: size of a received message.
    """

    connection: "BoundedConnection"
    timeout_seconds: float | None = None
    needs_message = False

    def __init__(
        self,
        connection: "BoundedConnection",
        h2_connection: H2Connection,
        writer: TickWriter,
        limits: TransportLimits,
        stream_id: int,
        unfinished: UnfinishedMessages,
    ) -> None:
        super().__init__(connection, h2_connection, writer.as_transport(), stream_id=stream_id)
        self.max_message_bytes = limits.max_message_bytes
        self._limits = limits
        self._unfinished = unfinished
        self._awaits_prefix = True
        self._awaits_request = True
        self._begun_at = asyncio.get_running_loop().time()

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        """Sets what a stream has once its id is known: a buffer that gives no window back by itself."""
        super().init_stream(stream_id, connection)
        self._received = MessageBuffer()
        self.buffer = cast(Buffer, self._received)

    async def recv_data(self, size: int) -> bytes:
        """Reads `size` bytes: of a prefix and of a message, in turn.

        Raises:
            GRPCError: the message is missing, compressed, over the limit, or ends too early, or the connection has too
                much of unfinished messages.
            ClientTooSlowError: it is the call's first message, and did not come within `request_seconds`, or too slowly
                while others waited for its room.
        """
        self._give_back()
        if self._awaits_prefix:
            data = await self._read(size, None)
            if data:
                self._check_prefix(data)
            elif self._awaits_request and self.needs_message:
                raise GRPCError(Status.INVALID_ARGUMENT, NO_MESSAGE)
        else:
            data = await self._read_message(size)
            self._awaits_request = False
        self._awaits_prefix = not self._awaits_prefix
        return data

    async def _read_message(self, size: int) -> bytes:
        if len(self._received) >= size:  # it came with its prefix, as most do
            return self._received.take(size)
        if self._received.has_ended:
            raise _cut_short()
        pace = _Pace()
        room = Room(size, pace.hurry)
        async with self._in_time(pace):
            await self._take(room)
            pace.begin()
            try:
                data = await self._read_whole(size)
            finally:
                self._unfinished.leave(room)
        return data

    async def _take(self, room: Room) -> None:
        """Waits for room; what comes meanwhile is counted there, and must leave the connection its window."""
        self._received.when_added = self._give_back
        try:
            await self._unfinished.take(room)
        finally:
            self._received.when_added = None

    async def _read(self, size: int, pace: "_Pace | None") -> bytes:
        if len(self._received) >= size:
            return self._received.take(size)
        async with self._in_time(pace):
            return await self._read_whole(size)

    async def _read_whole(self, size: int) -> bytes:
        """The next `size` bytes; fewer, of a prefix alone, where the stream has ended."""
        while len(self._received) < size and not self._received.has_ended:
            self._open_window(size - len(self._received))
            await self._received.wait()
            self._give_back()
        data = self._received.take(size)
        if len(data) < size and (data or not self._awaits_prefix):
            raise _cut_short()
        return data

    def _give_back(self) -> None:
        assert self.id is not None  # set when the stream was made
        self.connection.ack(self.id, self._received.unacked_size())

    def _open_window(self, num_bytes: int) -> None:
        """Lets so many more bytes in, if the client may not send them yet."""
        assert self.id is not None  # set when the stream was made
        stream = self._h2_connection.streams.get(self.id)
        missing = 0 if stream is None else num_bytes - stream.inbound_flow_control_window
        if missing > 0 and self.closable and not self._received.has_ended:
            least = self.connection.stream_window if self._awaits_prefix else 0
            self._h2_connection.increment_flow_control_window(max(missing, least), self.id)
            self.connection.flush()

    @asynccontextmanager
    async def _in_time(self, pace: "_Pace | None") -> AsyncIterator[None]:
        """Ends what takes longer than it may."""
        due = self._begun_at + self._limits.request_seconds if self._awaits_request else None
        try:
            async with asyncio.timeout_at(due) as timeout:
                if pace is not None:
                    pace.timeout = timeout
                yield
        except TimeoutError:
            if pace is not None and pace.seconds is not None:
                seconds, why = pace.seconds, ", and others wait for its room"
            else:
                seconds, why = self._limits.request_seconds, ""
            problem = f"the request message did not come within {seconds:g} s{why}"
            raise ClientTooSlowError(problem) from None

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

    def _check_prefix(self, prefix: bytes) -> None:
        is_compressed, num_bytes = PREFIX.unpack(prefix)
        if is_compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not served")
        if num_bytes > self.max_message_bytes:
            message = f"message of {num_bytes} bytes; allowed: {self.max_message_bytes}"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, message)


class _Pace:
    """How long one message may take while others wait.

    Attributes:
        timeout: of the message.
        seconds: how long it may take, once others wait; None before.
    """

    def __init__(self) -> None:
        self.timeout: asyncio.Timeout | None = None
        self.seconds: float | None = None
        self._begun_at = 0.0

    def begin(self) -> None:
        """The message has room from now on."""
        self._begun_at = asyncio.get_running_loop().time()
        if self.seconds is not None:
            self.hurry(self.seconds)

    def hurry(self, seconds: float) -> None:
        """The message must come within so many seconds of its beginning, or as soon as it had to before."""
        if self.timeout is None or self.timeout.expired():
            return
        due, now = self.timeout.when(), asyncio.get_running_loop().time()
        begun_at = self._begun_at or now
        if due is None or begun_at + seconds < due:
            self.seconds = seconds
            self.timeout.reschedule(begun_at + seconds)


def _cut_short() -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, "the message ends before its announced length")
