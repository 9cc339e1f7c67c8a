"""One connection: its settings, its end, and a watch on peers that do not read, do not write, or ask too much."""

import asyncio
import time
from typing import cast

import structlog
from grpclib.config import Configuration
from grpclib.metadata import encode_grpc_message
from grpclib.protocol import Connection, EventsProcessor, H2Protocol
from grpclib.utils import Wrapper
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, RequestReceived, StreamReset, WindowUpdated
from h2.settings import SettingCodes, Settings

from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.goaway import goaway
from pykv.service.transport.handler import CallHandler
from pykv.service.transport.headers import MAX_HEADER_BYTES, HeaderFault, fault_of
from pykv.service.transport.http2 import BoundedH2Connection
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.peers import Peers
from pykv.service.transport.stream import BoundedStream, UnfinishedMessages
from pykv.service.transport.writer import TickWriter

__all__ = ["ServerProtocol"]

LARGEST_STREAM_ID = 2**31 - 1
FEED_BYTES = 4096
FEED_SECONDS = 0.005
MAX_UNFED_BYTES = 256 * 1024
TOO_MANY_FRAMES = "too many resets, control frames or header fields"

log = structlog.get_logger("pykv.service")


class BoundedConnection(Connection):
    """A connection whose streams are bounded."""

    def __init__(
        self,
        h2: H2Connection,
        writer: TickWriter,
        config: Configuration,
        limits: TransportLimits,
        meter: FrameMeter,
    ) -> None:
        super().__init__(h2, writer.as_transport(), config=config)
        self.h2 = h2
        self._writer = writer
        self._limits = limits
        self.meter = meter
        self.unfinished = UnfinishedMessages(limits)

    def feed(self, data: bytes) -> list[Event]:
        """What `data` says, without that for which nothing needs to be done.

        That is the calls that it both begins and resets, and all but the last update of the connection's window, of
        each of which every stream would be told.
        """
        events = super().feed(data)
        resets = [event for event in events if isinstance(event, StreamReset)]
        if resets:
            self.meter.charge(sum(not event.remote_reset for event in resets))  # h2 did, because of an error
        gone = {event.stream_id for event in resets}
        needless = {
            id(event) for event in events if isinstance(event, RequestReceived) and event.stream_id in gone
        }
        updates = [event for event in events if isinstance(event, WindowUpdated) and event.stream_id == 0]
        needless.update(map(id, updates[:-1]))
        return [event for event in events if id(event) not in needless] if needless else events

    def create_stream(self, *, stream_id: int | None = None, wrapper: Wrapper | None = None) -> BoundedStream:
        """The stream of a call that a client began."""
        if stream_id is None:
            raise ValueError("stream_id is None; allowed: the id that the client chose")
        return BoundedStream(self, self.h2, self._writer, self._limits, stream_id, self.unfinished)


class CallEvents(EventsProcessor):
    """Hands HTTP/2 events to the calls, and refuses calls that begin after the last one that is served."""

    last_stream_id = LARGEST_STREAM_ID
    connection: BoundedConnection

    def process(self, event: Event) -> None:
        """Handles what is known; frames of extensions are ignored, as HTTP/2 demands."""
        processors = getattr(self, "processors", {})  # gone once the connection is closed
        if type(event) in processors:
            processors[type(event)](event)

    def process_request_received(self, event: RequestReceived) -> None:
        """Begins a call, or lets the client know that it may try elsewhere, or what is wrong with its headers."""
        assert event.stream_id is not None  # h2 sets it
        if event.stream_id > self.last_stream_id:
            self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        fault = fault_of(cast("list[tuple[str, str]]", event.headers))  # h2 decodes them
        if fault is None:
            super().process_request_received(event)
        else:
            self._refuse(event.stream_id, fault)

    def process_data_received(self, event: DataReceived) -> None:
        """Buffers data; an empty frame is no end of the stream."""
        if event.flow_controlled_length:
            super().process_data_received(event)

    def _refuse(self, stream_id: int, fault: HeaderFault) -> None:
        log.debug("headers refused", reason=fault.message)
        self.connection.meter.charge(1.0)
        if fault.status is None:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        if self._can_answer(stream_id):
            headers = [
                (":status", "200"),
                ("content-type", "application/grpc"),
                ("grpc-status", str(fault.status.value)),
                ("grpc-message", encode_grpc_message(fault.message)),
            ]
            self.connection.h2.send_headers(stream_id, headers, end_stream=True)
        self._reset(stream_id, ErrorCodes.NO_ERROR)  # the rest of a request that has not ended

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        if self._can_answer(stream_id):
            self.connection.h2.reset_stream(stream_id, code)

    def _can_answer(self, stream_id: int) -> bool:
        """Whether neither a later frame that came with the headers nor an answer has closed the stream."""
        h2 = self.connection.h2
        stream = h2.streams.get(stream_id)
        return (
            h2.state_machine.state is not ConnectionState.CLOSED and stream is not None and not stream.closed
        )


class ServerProtocol(H2Protocol):
    """One client's connection.

    Args:
        live: the connections that have begun and are not lost; it is one of them meanwhile.
        peers: where `peer` was admitted, and leaves when the connection is lost.

    Attributes:
        has_begun: whether the connection was made, its TLS handshake included.
    """

    connection: BoundedConnection
    processor: CallEvents

    def __init__(
        self,
        handler: CallHandler,
        config: Configuration,
        h2_config: H2Configuration,
        limits: TransportLimits,
        live: "set[ServerProtocol]",
        peers: Peers,
        peer: str,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self.has_begun = False
        self._limits = limits
        self._live = live
        self._peers = peers
        self._peer = peer
        self._lost = asyncio.Event()
        self._unfed = bytearray()
        self._is_paused = False
        self._stalled: asyncio.TimerHandle | None = None
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says the settings, once, and waits for calls."""
        self.has_begun = True
        self._transport = cast(asyncio.Transport, transport)
        self._writer = TickWriter(self._transport)
        meter = FrameMeter(self._limits)
        h2 = BoundedH2Connection(self.h2_config, meter.charge_fields)
        h2.local_settings = self._settings()
        h2.initiate_connection()
        more_window = self.config.http2_connection_window_size - h2.inbound_flow_control_window
        h2.increment_flow_control_window(more_window)
        self.connection = BoundedConnection(h2, self._writer, self.config, self._limits, meter)
        self.connection.flush()
        self.connection.initialize()
        self.processor = CallEvents(self.handler, self.connection)
        self._live.add(self)
        self._expect_more()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the calls of this connection."""
        self._lost.set()
        self._live.discard(self)
        self._peers.leave(self._peer)
        self._expect_nothing()
        self._unfed.clear()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sent; one that sends too many resets, control frames or header fields is sent away."""
        meter = self.connection.meter
        if meter.is_overdrawn:
            return  # what still came before the connection was closed
        num_begun = meter.num_begun
        meter.read(data, len(self.connection.h2.streams))
        if meter.is_overdrawn:
            self._send_away(TOO_MANY_FRAMES)
            return
        is_first = not self._unfed
        self._unfed += data
        if is_first:
            self._feed()
        else:  # a later turn goes on with all of it
            self._heed_unfed()
        if meter.is_overdrawn:
            return
        if not meter.is_amid:
            self._expect_nothing()
        elif self._overdue is None or meter.num_begun > num_begun:
            self._expect_more()

    def _feed(self) -> None:
        """Does what the client asks for, for one part of a turn of the loop: others get theirs before the rest."""
        due = time.monotonic() + FEED_SECONDS
        while self._unfed and not self._transport.is_closing():
            data = bytes(self._unfed[:FEED_BYTES])
            del self._unfed[:FEED_BYTES]
            super().data_received(data)
            if self.connection.meter.is_overdrawn:
                self._send_away(TOO_MANY_FRAMES)
                return
            if self._unfed and time.monotonic() >= due:
                self._heed_unfed()
                asyncio.get_running_loop().call_soon(self._feed)
                return
        if self._transport.is_closing():
            self._unfed.clear()
        self._heed_unfed()

    def _heed_unfed(self) -> None:
        """Reads no more while much waits; some may come: unread bytes would cut a goodbye off."""
        is_much = len(self._unfed) >= MAX_UNFED_BYTES
        if is_much == self._is_paused or self._transport.is_closing():
            return
        self._is_paused = is_much
        if is_much:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Stops the streams; a peer that takes nothing for too long is cut off, with all its calls."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stalled = loop.call_later(self._limits.stall_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        """Lets the streams go on."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def announce_end(self) -> None:
        """Asks the client to begin no more calls here; those on their way are still served."""
        self._writer.write(goaway(LARGEST_STREAM_ID))

    def refuse_further_calls(self) -> None:
        """Serves the calls that have begun, and no other."""
        self.processor.last_stream_id = self.connection.h2.highest_inbound_stream_id
        self._writer.write(goaway(self.processor.last_stream_id))

    def close(self) -> None:
        """Closes the connection once what was sent is out, or soon after."""
        self._writer.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Returns once the connection is lost."""
        await self._lost.wait()

    def _settings(self) -> Settings:
        values = {
            SettingCodes.MAX_CONCURRENT_STREAMS: self._limits.max_streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
            SettingCodes.INITIAL_WINDOW_SIZE: self.config.http2_stream_window_size,
        }
        return Settings(client=False, initial_values=values)

    def _expect_more(self) -> None:
        """Gives the client its time for what it has begun to send."""
        self._expect_nothing()
        loop = asyncio.get_running_loop()
        self._overdue = loop.call_later(
            self._limits.request_seconds, self._send_away, "the rest of a frame did not come in time"
        )

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _send_away(self, reason: str) -> None:
        log.warning("connection closed", reason=reason, peer=self._transport.get_extra_info("peername"))
        self._expect_nothing()
        self._unfed.clear()
        last_stream_id = self.connection.h2.highest_inbound_stream_id
        self._writer.write(goaway(last_stream_id, ErrorCodes.ENHANCE_YOUR_CALM, reason))
        self.processor.close(reason)
