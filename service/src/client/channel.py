"""A channel whose streams live on when the server asks for no more calls."""

import asyncio
import ssl
from collections.abc import Callable

from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import Event
from h2.utilities import SizeLimitDict
from hyperframe.frame import Frame, GoAwayFrame

from pykv.service.frame_buffer import CheckedFrameBuffer
from pykv.service.keepalive import Keepalive

__all__ = ["PatientChannel"]

MAX_CLOSED_STREAMS = 8192
"""Of so many calls their ends are remembered, for what a server still sends to one that was left.

More than may run at once on one connection; what comes for one that was forgotten ends the connection.
"""

TOO_MANY_PINGS = b"too_many_pings"  # gRPC's word for it in a goodbye
ASKED_TOO_OFTEN = (
    "the server closed the connection: too_many_pings; a larger keepalive_seconds asks less often"
)

Received = tuple[list[Frame], list[Event]]


class PatientChannel(Channel):
    """Begins its next call on a new connection once the server said goodbye on the old one.

    grpclib alone ends every stream at that moment, and a server that drains would cut its clients off.

    Args:
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
        keepalive_seconds: float | None = None,
        keepalive_timeout_seconds: float = 20.0,
    ) -> None:
        super().__init__(host, port, ssl=tls)
        self._protocols: set[PatientProtocol] = set()
        self._keepalive = keepalive_seconds, keepalive_timeout_seconds

    def close(self) -> None:
        """Closes all connections."""
        super().close()
        for protocol in list(self._protocols):
            protocol.close()

    def _protocol_factory(self) -> "PatientProtocol":
        return PatientProtocol(Handler(), self._config, self._h2_config, self._protocols, *self._keepalive)


class PatientProtocol(H2Protocol):
    """A connection that ends with its last stream after a goodbye, and with all of them where the server is gone."""

    handler: Handler

    def __init__(
        self,
        handler: Handler,
        config: Configuration,
        h2_config: H2Configuration,
        live: "set[PatientProtocol]",
        keepalive_seconds: float | None,
        keepalive_timeout_seconds: float,
    ) -> None:
        super().__init__(handler, config, h2_config)
        self._live = live
        self._seconds, self._timeout_seconds = keepalive_seconds, keepalive_timeout_seconds
        self._keepalive: Keepalive | None = None
        self._reason = "Connection lost"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bounds what h2 keeps, and takes the goodbye away from it, by which it would take all for closed."""
        super().connection_made(transport)
        h2 = self.connection._connection
        h2.incoming_buffer = CheckedFrameBuffer()
        h2._closed_streams = SizeLimitDict(size_limit=MAX_CLOSED_STREAMS)
        dispatch = h2._frame_dispatch_table
        dispatch[GoAwayFrame] = self._goodbye(dispatch[GoAwayFrame])
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

    def data_received(self, data: bytes) -> None:
        """Whatever comes, the server is there."""
        if self._keepalive is not None:
            self._keepalive.hear()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the streams; where that was done already they keep the reason."""
        self._live.discard(self)
        self._stop_asking()
        self.processor.close(self._reason)

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
        """Closes at once: what was sent would wait for a server that is gone."""
        if self.connection.is_closing():
            return
        self._reason = (
            f"the server sent nothing for {self._seconds:g} s and did not answer a ping within "
            f"{self._timeout_seconds:g} s"
        )
        transport = self.connection._transport
        self.processor.close(self._reason)
        transport.abort()

    def _goodbye(self, default: Callable[[GoAwayFrame], Received]) -> Callable[[GoAwayFrame], Received]:
        def receive(frame: GoAwayFrame) -> Received:
            is_about_pings = frame.additional_data == TOO_MANY_PINGS
            if frame.error_code != ErrorCodes.NO_ERROR and not is_about_pings:
                return default(frame)
            self.handler.connection_lost = True  # for the channel's next call, that is
            if is_about_pings:
                self._reason = ASKED_TOO_OFTEN
                asyncio.get_running_loop().call_soon(
                    self.processor.close, ASKED_TOO_OFTEN
                )  # h2 is at work now
                return [], []
            self._end_streams_after(frame.last_stream_id)
            return [], []

        return receive

    def _end_streams_after(self, last_stream_id: int) -> None:
        for stream_id, stream in list(self.processor.streams.items()):
            if stream_id > last_stream_id:
                stream.__terminated__("the server is shutting down and did not begin the call")
