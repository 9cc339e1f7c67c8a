"""One connection: its settings, its end, and a watch on peers that do not read, do not write, or ask too much."""

import asyncio
import time
from typing import cast

from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings

from pykv.service.bounded_log import BoundedLog
from pykv.service.transport.events import LARGEST_STREAM_ID, BoundedConnection, CallEvents
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.handler import CallHandler
from pykv.service.transport.headers import MAX_HEADER_BYTES
from pykv.service.transport.http2 import BoundedH2Connection
from pykv.service.transport.keepalive import Keepalive
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.offence import Offence
from pykv.service.transport.peers import Peers
from pykv.service.transport.writer import TickWriter

__all__ = ["ServerProtocol"]

FEED_BYTES = 4096
FEED_SECONDS = 0.005
MAX_UNFED_BYTES = 256 * 1024


class ServerProtocol(H2Protocol):
    """One client's connection.

    Args:
        live: the connections that have begun and are not lost; it is one of them meanwhile.
        peers: where `peer` was admitted, and leaves when the connection is lost.
        lines: where it is told why the connection was closed.

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
        lines: BoundedLog,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self.has_begun = False
        self._limits = limits
        self._live = live
        self._peers = peers
        self._peer = peer
        self._lines = lines
        self._lost = asyncio.Event()
        self._unfed = bytearray()
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
        self.connection = BoundedConnection(h2, self._writer, self.config, self._limits, meter)
        self.connection.flush()
        self.processor = CallEvents(self.handler, self.connection)
        self._keepalive = Keepalive(
            self._limits, self.connection.ping, lambda: bool(self.processor.streams), self._end_vanished
        )
        self._live.add(self)
        self._expect_more()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the calls of this connection."""
        self._lost.set()
        self._keepalive.stop()
        del self._keepalive  # each would hold the other
        self._live.discard(self)
        self._peers.leave(self._peer)
        self._expect_nothing()
        self._unfed.clear()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sent; one that sends too many resets, control frames or header fields is sent away."""
        if self._is_sent_away:
            return  # what still came before the connection was closed
        self._keepalive.hear()
        meter = self.connection.meter
        num_begun = meter.num_begun
        meter.read(data, len(self.connection.h2.streams))
        if meter.is_overdrawn:
            self._send_away(Offence.CONTROL_FRAMES)
            return
        is_first = not self._unfed
        self._unfed += data
        if is_first:
            self._feed()
        else:  # a later turn goes on with all of it
            self._heed_unfed()
        if self._is_sent_away:
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
            offence = self.connection.offence
            if offence is not None:
                self._send_away(offence)
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
        self.connection.say_goodbye(LARGEST_STREAM_ID)

    def refuse_further_calls(self) -> None:
        """Serves the calls that have begun, and no other."""
        self.processor.last_stream_id = self.processor.last_begun
        self.connection.say_goodbye(self.processor.last_stream_id)

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
        self._overdue = loop.call_later(self._limits.request_seconds, self._send_away, Offence.OVERDUE)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _send_away(self, offence: Offence) -> None:
        self._is_sent_away = True
        self._tell(offence)
        self._keepalive.stop()
        self._expect_nothing()
        self._unfed.clear()
        self.connection.say_goodbye(self.processor.last_begun, ErrorCodes.ENHANCE_YOUR_CALM, offence.value)
        self.processor.close(offence.value)

    def _end_vanished(self) -> None:
        """Closes at once: what was sent would wait for a peer that does not answer."""
        self._tell(Offence.VANISHED)
        self.abort()

    def _tell(self, offence: Offence) -> None:
        self._peers.count_closed(offence)
        peer = self._transport.get_extra_info("peername")
        self._lines.write("warning", "connection closed", {"reason": offence.value}, peer=peer)
