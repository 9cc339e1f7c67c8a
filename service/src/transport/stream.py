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

from pykv.service.errors import ClientTooSlowError, RequestMemoryError
from pykv.service.transport.headers import NO_MESSAGE, SEVERAL_MESSAGES
from pykv.service.transport.incoming import Incoming
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.message_buffer import MessageBuffer
from pykv.service.transport.room import SLOW_SECONDS, Room
from pykv.service.transport.room_queue import NO_ROOM
from pykv.service.transport.writer import TickWriter

if TYPE_CHECKING:
    from pykv.service.transport.events import BoundedConnection

__all__ = ["BoundedStream"]

PREFIX = struct.Struct(">BI")  # of each gRPC message: a flag for compression, the length in bytes


class BoundedStream(Stream):
    """A stream that refuses a message by its announced length, and that gives a stalled client up.

    Its window lets the start of a message in. For more it is opened once the method reads the message and there is
    room for all of it: a call that is refused by its headers takes nothing more. The room is the message's until it is
    handed to the method; where that takes one message alone, that is when the client has said that it was the last.

    Attributes:
        timeout_seconds: what the client gave the call, from its start; None = no limit.
        has_one_message: whether the request is one message, not a stream of them.
        max_message_bytes: size of a received message.
        is_queued: whether the method bounds its calls by itself once they have their requests.
        group: with whom the call shares the room for requests, once that is known; None = with its peer.
    """

    connection: "BoundedConnection"
    timeout_seconds: float | None = None
    has_one_message = False
    is_queued = False
    group: str | None = None

    def __init__(
        self,
        connection: "BoundedConnection",
        h2_connection: H2Connection,
        writer: TickWriter,
        limits: TransportLimits,
        stream_id: int,
        incoming: Incoming,
    ) -> None:
        super().__init__(connection, h2_connection, writer.as_transport(), stream_id=stream_id)
        self.max_message_bytes = limits.max_message_bytes
        self._limits = limits
        self._incoming = incoming
        self._awaits_prefix = True
        self._awaits_request = True
        self._loop = asyncio.get_running_loop()
        self._begun_at = self._loop.time()  # what the client has its time for

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        """Sets what a stream has once its id is known: a buffer that gives no window back by itself."""
        super().init_stream(stream_id, connection)
        self._received = MessageBuffer()
        self.buffer = cast(Buffer, self._received)

    async def recv_data(self, size: int) -> bytes:
        """Reads `size` bytes: of a prefix and of a message, in turn.

        Raises:
            GRPCError: the message is missing, compressed, over the limit, ends too early or is not the only one where
                it must be.
            ClientTooSlowError: the message, or the end of the request, did not come within `request_seconds`.
            RequestMemoryError: there was no room for it, or others needed its room.
        """
        self._give_back()
        data = await (self._read_prefix(size) if self._awaits_prefix else self._read_message(size))
        self._awaits_prefix = not self._awaits_prefix
        return data

    async def _read_prefix(self, size: int) -> bytes:
        """The prefix; nothing where the request has ended."""
        if not self._awaits_request:
            self._begun_at = self._loop.time()
        if len(self._received) < size:
            async with self._in_time():
                while len(self._received) < size and not self._received.has_ended:
                    await self._receive_more(size, self.connection.stream_window)
        data = self._received.take(size)
        if len(data) == size:
            self._check_prefix(data)
        elif data:
            raise _cut_short()
        elif self._awaits_request and self.has_one_message:
            raise GRPCError(Status.INVALID_ARGUMENT, NO_MESSAGE)
        return data

    async def _read_message(self, size: int) -> bytes:
        """A message that may be handed to the method."""
        if not self._has_come(size):  # it came with its prefix and its end, as most do
            await self._wait_for(size)
        if self.is_queued:
            self._incoming.end(self._id)
        self._awaits_request = False
        return self._received.take(size)

    async def _wait_for(self, size: int) -> None:
        """Returns once such a message is there; it has its room until then."""

        def expire(at: float) -> None:
            if not timeout.expired():
                timeout.reschedule(at)

        incoming = self._incoming
        room = Room(incoming.sharer, size, lambda: expire(self._loop.time()), incoming.is_behind, self.group)
        async with self._in_time(room) as timeout:
            asked_at = self._loop.time()
            await self._take(room)
            try:
                self._begun_at += self._loop.time() - asked_at  # that it waited is not the client's fault
                if not room.is_lost:  # as it may be again before this has its turn
                    expire(self._begun_at + self._limits.request_seconds)
                self._tell_of(room)
                while not self._has_come(size):
                    await self._receive_more(size, 0)
            finally:
                self._received.when_changed = None
                self._incoming.leave(room)

    def _has_come(self, size: int) -> bool:
        """Whether a message of so many bytes is there and, if it must be the only one, the end too.

        Raises:
            GRPCError: there is more than the one message, or the request ended amid it.
        """
        has_ended, num_received = self._received.has_ended, len(self._received)
        if num_received > size and self.has_one_message:
            raise GRPCError(Status.INVALID_ARGUMENT, SEVERAL_MESSAGES)
        if num_received < size and has_ended:
            raise _cut_short()
        return num_received >= size and (has_ended or not self.has_one_message)

    async def _take(self, room: Room) -> None:
        """Waits for room; what comes meanwhile is counted there, and must leave the connection its window."""

        def heed() -> None:
            self._give_back()
            is_enough = len(self._received) >= room.num_bytes and not self.has_one_message
            if is_enough or self._received.has_ended or len(self._received) > room.num_bytes:
                self._incoming.excuse(room)

        self._received.when_changed = heed
        try:
            await self._incoming.take(room)
        finally:
            self._received.when_changed = None

    def _tell_of(self, room: Room) -> None:
        """Tells, frame by frame, how much of the message comes from now on."""
        num_told = len(self._received)

        def tell() -> None:
            nonlocal num_told
            if len(self._received) > num_told:
                self._incoming.hear(room, len(self._received) - num_told)
                num_told = len(self._received)

        self._received.when_changed = tell

    async def _receive_more(self, num_bytes: int, least_window: int) -> None:
        """Waits until something more of the next `num_bytes` comes, or the end."""
        self._open_window(num_bytes - len(self._received), least_window)
        await self._received.wait()
        self._give_back()

    @property
    def _id(self) -> int:
        return cast(int, self.id)  # set when the stream was made

    def _give_back(self) -> None:
        self.connection.ack(self._id, self._received.unacked_size())

    def _open_window(self, num_bytes: int, least: int) -> None:
        """Lets so many more bytes in, and then `least` at least, if the client may not send them yet."""
        stream = self._h2_connection.streams.get(self._id)
        missing = 0 if stream is None else num_bytes - stream.inbound_flow_control_window
        if missing > 0 and self.closable and not self._received.has_ended:
            self._h2_connection.increment_flow_control_window(max(missing, least), self._id)
            self.connection.flush()

    @asynccontextmanager
    async def _in_time(self, room: Room | None = None) -> AsyncIterator[asyncio.Timeout]:
        """Ends what takes longer than it may.

        Args:
            room: of the message that is to come; None = what is to come is its prefix.
        """
        try:
            async with asyncio.timeout_at(self._begun_at + self._limits.request_seconds) as timeout:
                yield timeout
        except TimeoutError:
            raise self._lateness(room) from None

    def _lateness(self, room: Room | None) -> Exception:
        seconds = f"{self._limits.request_seconds:g} s"
        if room is not None and room.is_lost:
            return self._loss(room)
        if room is not None and not room.is_given:
            return RequestMemoryError(f"{NO_ROOM}, after {seconds}")
        has_message = room is not None and len(self._received) >= room.num_bytes
        what = "the end of the request" if has_message else "the request message"
        return ClientTooSlowError(f"{what} did not come within {seconds}")

    def _loss(self, room: Room) -> RequestMemoryError:
        """Why a message lost its room."""
        if not room.was_slow:
            problem = "others that have less than its connection wait for the room of the request message"
            return RequestMemoryError(f"{problem}; try again later")
        if not room.num_come:
            self._incoming.count_slow()
        little = "too little more" if room.num_come else "nothing more"
        problem = f"{little} of the request message came within {SLOW_SECONDS:g} s"
        return RequestMemoryError(f"{problem}, and others wait for its room; try again later")

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
            message = f"message of {num_bytes} bytes: allowed is {self.max_message_bytes}"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, message)


def _cut_short() -> GRPCError:
    return GRPCError(Status.INVALID_ARGUMENT, "the message ends before its announced length")
