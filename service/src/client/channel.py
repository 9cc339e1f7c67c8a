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

__all__ = ["PatientChannel"]

MAX_CLOSED_STREAMS = 8192
"""Of so many calls their ends are remembered, for what a server still sends to one that was left.

More than may run at once on one connection; what comes for one that was forgotten ends the connection.
"""

Received = tuple[list[Frame], list[Event]]


class PatientChannel(Channel):
    """Begins its next call on a new connection once the server said goodbye on the old one.

    grpclib alone ends every stream at that moment, and a server that drains would cut its clients off.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(host, port, ssl=tls)
        self._protocols: set[PatientProtocol] = set()

    def close(self) -> None:
        """Closes all connections."""
        super().close()
        for protocol in list(self._protocols):
            protocol.processor.close()

    def _protocol_factory(self) -> "PatientProtocol":
        return PatientProtocol(Handler(), self._config, self._h2_config, self._protocols)


class PatientProtocol(H2Protocol):
    """A connection that ends with its last stream after a goodbye."""

    handler: Handler

    def __init__(
        self,
        handler: Handler,
        config: Configuration,
        h2_config: H2Configuration,
        live: "set[PatientProtocol]",
    ) -> None:
        super().__init__(handler, config, h2_config)
        self._live = live

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bounds what h2 remembers, and takes the goodbye away from it, by which it would take all for closed."""
        super().connection_made(transport)
        h2 = self.connection._connection
        h2._closed_streams = SizeLimitDict(size_limit=MAX_CLOSED_STREAMS)
        dispatch = h2._frame_dispatch_table
        dispatch[GoAwayFrame] = self._goodbye(dispatch[GoAwayFrame])
        self._live.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Ends the streams."""
        self._live.discard(self)
        super().connection_lost(exc)

    def _goodbye(self, default: Callable[[GoAwayFrame], Received]) -> Callable[[GoAwayFrame], Received]:
        def receive(frame: GoAwayFrame) -> Received:
            if frame.error_code != ErrorCodes.NO_ERROR:
                return default(frame)
            self.handler.connection_lost = True  # for the channel's next call, that is
            self._end_streams_after(frame.last_stream_id)
            return [], []

        return receive

    def _end_streams_after(self, last_stream_id: int) -> None:
        for stream_id, stream in list(self.processor.streams.items()):
            if stream_id > last_stream_id:
                stream.__terminated__("the server is shutting down and did not begin the call")
