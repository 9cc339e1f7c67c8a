"""A channel that bounds what a server sends, and whose streams live on when it asks for no more calls."""

import asyncio
import ssl

from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from h2.utilities import SizeLimitDict

from pykv.service.client.codec import ReplyCodec
from pykv.service.client.events import ReplyConnection, ReplyEvents
from pykv.service.client.reply_stream import STREAM_WINDOW_BYTES
from pykv.service.client.tls_failures import Reason, why_ended, why_unreadable
from pykv.service.frame_buffer import MAX_BLOCK_BYTES
from pykv.service.http2 import BoundedH2Connection
from pykv.service.keepalive import Keepalive

__all__ = ["DEFAULT_MAX_MESSAGE_BYTES", "PatientChannel"]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20

OPENING_BYTES = 16
"""Bytes of how the server began, which tell what it speaks."""
MAX_CLOSED_STREAMS = 8192
"""Of so many calls their ends are remembered, for what a server still sends to one that was left.

More than may run at once on one connection.
"""

SETTINGS = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.MAX_HEADER_LIST_SIZE: MAX_BLOCK_BYTES,
    SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
}


class PatientChannel(Channel):
    """Begins its next call on a new connection once the server said goodbye on the old one.

    grpclib alone ends every stream at that moment, and a server that drains would cut its clients off.

    Args:
        max_message_bytes: size of a received message.
        keepalive_seconds: after so long without a byte from the server, while there are calls, it is asked by a PING
            whether it is there; None = never.
        keepalive_timeout_seconds: how long it may take to answer; then the calls of its connection end, and the next
            one makes a new connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        keepalive_seconds: float | None = None,
        keepalive_timeout_seconds: float = 20.0,
    ) -> None:
        super().__init__(host, port, ssl=tls, codec=ReplyCodec())
        self._protocols: set[PatientProtocol] = set()
        self._max_message_bytes = max_message_bytes
        self._keepalive = keepalive_seconds, keepalive_timeout_seconds

    def close(self) -> None:
        """Closes all connections."""
        super().close()
        for protocol in list(self._protocols):
            protocol.close()

    def _protocol_factory(self) -> "PatientProtocol":
        return PatientProtocol(
            Handler(),
            self._config,
            self._h2_config,
            self._protocols,
            self._max_message_bytes,
            *self._keepalive,
        )


class PatientProtocol(H2Protocol):
    """A connection that ends with its last stream after a goodbye, and with all of them where the server is gone."""

    handler: Handler
    connection: ReplyConnection
    processor: ReplyEvents

    def __init__(
        self,
        handler: Handler,
        config: Configuration,
        h2_config: H2Configuration,
        live: "set[PatientProtocol]",
        max_message_bytes: int,
        keepalive_seconds: float | None,
        keepalive_timeout_seconds: float,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self._live = live
        self._max_message_bytes = max_message_bytes
        self._seconds, self._timeout_seconds = keepalive_seconds, keepalive_timeout_seconds
        self._keepalive: Keepalive | None = None
        self._reason: Reason | None = None  # that was told already
        self._opening = b""  # of what the server sent
        self._is_tls = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says the settings, once."""
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        h2 = self._begin()
        self.connection = ReplyConnection(h2, transport, self.config, self._max_message_bytes)
        self.connection.flush()
        self.processor = ReplyEvents(self.handler, self.connection)
        self._live.add(self)
        if self._seconds is not None:
            self._keepalive = Keepalive(
                self._seconds,
                self._timeout_seconds,
                permits_without_calls=False,
                ping=self._ping,
                has_calls=lambda: bool(self.processor.streams),
                give_up=self._give_up,
            )

    def _begin(self) -> BoundedH2Connection:
        h2 = BoundedH2Connection(self.h2_config)
        h2.local_settings = Settings(client=True, initial_values=SETTINGS)
        h2.initiate_connection()
        h2.increment_flow_control_window(
            self.config.http2_connection_window_size - h2.inbound_flow_control_window
        )
        h2._closed_streams = SizeLimitDict(size_limit=MAX_CLOSED_STREAMS)
        return h2

    def data_received(self, data: bytes) -> None:
        """Takes what the server sent, by which it is there; what HTTP/2 forbids ends the connection."""
        if self._keepalive is not None:
            self._keepalive.hear()
        if self.connection.is_closing():
            return
        self._opening = self._opening or data[:OPENING_BYTES]
        try:
            events = self.connection.feed(data)
        except ProtocolError as error:
            self._reason = why_unreadable(error, self._opening)
            self.processor.end(self._reason)
            return
        self.connection.flush()
        for event in events:
            self.processor.process(event)
        self.connection.flush()
        if self.connection.is_not_read:
            self._abort("the server asks for answers and reads none")

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the streams; where that was done already they keep the reason."""
        self._live.discard(self)
        self._stop_asking()
        self.processor.end(self._reason or why_ended(exc, self._opening, is_tls=self._is_tls))

    def close(self) -> None:
        """Ends the streams, and the connection."""
        self._stop_asking()
        self.processor.close()

    def _stop_asking(self) -> None:
        if self._keepalive is not None:
            self._keepalive.stop()
            self._keepalive = None  # each would hold the other

    def _ping(self) -> None:
        if not self.connection.is_closing():
            self.connection._connection.ping(bytes(8))
            self.connection.flush()

    def _give_up(self) -> None:
        """What was sent would wait for a server that is gone."""
        if self.connection.is_closing():
            return
        silence = f"the server sent nothing for {self._seconds:g} s"
        self._abort(f"{silence} and did not answer a ping within {self._timeout_seconds:g} s")

    def _abort(self, reason: str) -> None:
        """Ends all streams and closes at once, without what waits to be sent."""
        self._reason = Reason(reason)
        transport = self.connection._transport
        self.processor.end(self._reason)
        transport.abort()
