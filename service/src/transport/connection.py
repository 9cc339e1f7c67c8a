"""One connection: its settings, its end, and a watch on peers that do not read, do not write, or ask too much."""

import asyncio
from functools import partial
from typing import cast

from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from pykv.service.bounded_log import BoundedLog
from pykv.service.http2 import BoundedH2Connection
from pykv.service.keepalive import Keepalive
from pykv.service.transport.backlog import Backlog
from pykv.service.transport.departure import Departure
from pykv.service.transport.events import LARGEST_STREAM_ID, BoundedConnection, CallEvents
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.handler import CallHandler
from pykv.service.transport.headers import MAX_HEADER_BYTES
from pykv.service.transport.incoming import Incoming
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.offence import Offence
from pykv.service.transport.peers import Peers
from pykv.service.transport.request_memory import RequestMemory
from pykv.service.transport.shared_budget import Sharer
from pykv.service.transport.turns import Turns
from pykv.service.transport.writer import TickWriter

__all__ = ["ServerProtocol"]

MAX_BACKLOG_BYTES = 64 * 1024
ERROR_CHARACTERS = 200


class ServerProtocol(H2Protocol):
    """One client's connection.

    Args:
        live: the connections that have begun and are not lost; it is one of them meanwhile.
        peers: where `peer` was admitted, and leaves when the connection is lost.
        turns: when it handles what it receives.
        memory: for requests of all connections.
        lines: where it is told why the connection was closed.
        generation: how often clients had been distrusted when it was accepted.

    Attributes:
        has_begun: whether the connection was made, its TLS handshake included.
    """

    handler: CallHandler
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
        turns: Turns,
        memory: RequestMemory,
        lines: BoundedLog,
        generation: int,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self.generation = generation
        self.has_begun = False
        self._limits = limits
        self._live = live
        self._peers = peers
        self._peer = peer
        self._turns = turns
        self._memory = memory
        self._lines = lines
        self._lost = asyncio.Event()
        self._backlog = Backlog()
        self._is_paused = False
        self._stalled: asyncio.TimerHandle | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._is_sent_away = False

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
        backlog = self._backlog  # not self, which would hold itself
        incoming = Incoming(self._limits, self._memory, Sharer(self._peer), lambda: backlog.has_piece)
        self.connection = BoundedConnection(h2, self._writer, self.config, self._limits, meter, incoming)
        self.connection.flush()
        self.handler.count_bad_messages(self.connection.refusals.count)
        self.processor = CallEvents(self.handler, self.connection, self._lines)
        self._keepalive = Keepalive(
            self._limits.keepalive_seconds,
            self._limits.keepalive_timeout_seconds,
            self._limits.keepalive_permit_without_calls,
            ping=self.connection.ping,
            has_calls=lambda: bool(self.processor.streams),
            give_up=partial(self._cut_off, Offence.VANISHED),
        )
        self._departure = Departure(
            self._transport.get_extra_info("peercert"), self.announce_end, self._refuse_and_end
        )
        self._live.add(self)
        self._expect_more()
        self._departure.watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the calls of this connection."""
        self._lost.set()
        self._keepalive.stop()
        self._departure.cancel()
        del self._keepalive, self._departure  # each would hold the other
        self._live.discard(self)
        self._peers.leave(self._peer)
        self._expect_nothing()
        self._backlog.clear()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sent, and handles it when it is this connection's turn."""
        if self._is_sent_away:
            return  # what still came before the connection was closed
        self._keepalive.hear()
        self._backlog.append(data)
        self._turns.add(self)
        self._heed_backlog()

    @property
    def has_more(self) -> bool:
        """Whether something that was received is not handled yet."""
        return self._backlog.has_piece

    def feed(self) -> int:
        """Handles one piece of what was received, and returns how many calls that began.

        A client that sends too many frames that cost it nothing, or calls that nobody serves, is sent away.
        """
        if self._transport.is_closing():
            self._backlog.clear()
            return 0
        num_begun = self.connection.streams_started
        num_frames = self.connection.meter.num_begun
        try:
            self._handle(self._backlog.take())
        except ProtocolError as error:
            self._end_broken(ErrorCodes(error.error_code), error)
        except Exception as error:
            self._lines.write("error", "connection failed", {"kind": type(error).__name__}, exc_info=error)
            self._end_broken(ErrorCodes.INTERNAL_ERROR, error)
        self._heed_time(num_frames)
        self._heed_backlog()
        return self.connection.streams_started - num_begun

    def _handle(self, piece: bytes) -> None:
        connection = self.connection
        connection.meter.read(piece, len(connection.h2.streams))
        if not connection.meter.is_overdrawn:
            events = connection.feed(piece)
            connection.flush()
            for event in events:
                self.processor.process(event)
            connection.flush()
        if connection.offence is not None:
            self._send_away(connection.offence)

    def _heed_backlog(self) -> None:
        """Reads no more while much waits; some may come: unread bytes would cut a goodbye off."""
        is_much = len(self._backlog) >= MAX_BACKLOG_BYTES
        if is_much == self._is_paused or self._transport.is_closing():
            return
        self._is_paused = is_much
        if is_much:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _heed_time(self, num_frames: int) -> None:
        """Gives the client its time for what it has begun to send since there were so many frames."""
        if self._transport.is_closing():
            return
        meter = self.connection.meter
        if not (meter.is_amid or self._backlog):
            self._expect_nothing()
        elif self._overdue is None or meter.num_begun > num_frames:
            self._expect_more()

    def pause_writing(self) -> None:
        """Stops the streams; a peer that takes nothing for too long is cut off, with all its calls."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stalled = loop.call_later(self._limits.stall_seconds, self._cut_off, Offence.STALLED)

    def resume_writing(self) -> None:
        """Lets the streams go on."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def announce_end(self) -> None:
        """Asks the client to begin no more calls here; those on their way are still served."""
        self.connection.say_goodbye(LARGEST_STREAM_ID)

    def refuse_further_calls(self) -> None:
        """Serves the calls that have begun, and no other."""
        self.processor.last_stream_id = self.processor.last_begun
        self.connection.say_goodbye(self.processor.last_stream_id)

    def leave_if_certified(self) -> None:
        """Asks a client that showed a certificate to leave: calls that run go on, others need a new connection."""
        if self.has_begun and not self._lost.is_set() and self._departure.has_certificate:
            self._departure.begin()

    def _refuse_and_end(self) -> None:
        """Serves the calls that have begun, and ends with the last of them."""
        self.refuse_further_calls()
        self.processor.close_when_done()

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
        self._overdue = loop.call_later(self._limits.request_seconds, self._be_overdue)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _be_overdue(self) -> None:
        """Sends the client away, unless it is the server that is late."""
        if self._backlog.has_piece:
            self._expect_more()
        else:
            self._send_away(Offence.OVERDUE)

    def _send_away(self, offence: Offence) -> None:
        self._end(offence)
        self.connection.say_goodbye(self.processor.last_begun, ErrorCodes.ENHANCE_YOUR_CALM, offence.value)
        self.processor.close(offence.value)

    def _end_broken(self, code: ErrorCodes, error: Exception) -> None:
        """Says goodbye after an error that is not one call's: what comes next could not be told apart."""
        self._end(Offence.PROTOCOL, error=str(error)[:ERROR_CHARACTERS])
        self.connection.flush()
        self.connection.say_goodbye(self.processor.last_begun, code, Offence.PROTOCOL.value)
        self.processor.close(Offence.PROTOCOL.value)

    def _end(self, offence: Offence, **details: str) -> None:
        self._is_sent_away = True
        self._tell(offence, **details)
        self._keepalive.stop()
        self._expect_nothing()
        self._backlog.clear()

    def _cut_off(self, offence: Offence) -> None:
        """Closes at once: what was sent would wait for a peer that does not take it, or is gone."""
        self._tell(offence)
        self.abort()

    def _tell(self, offence: Offence, **details: str) -> None:
        self._peers.count_closed(offence)
        peer = self._transport.get_extra_info("peername")
        self._lines.write("warning", "connection closed", {"reason": offence.value}, peer=peer, **details)
