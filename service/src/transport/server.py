"""The listening server and the end of its connections."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import cast

import anyio
from grpclib._typing import IServable
from grpclib.config import Configuration
from grpclib.encoding.proto import ProtoStatusDetailsCodec
from grpclib.server import Server

from pykv.service.bounded_log import BoundedLog
from pykv.service.transport.arrivals import Arrivals
from pykv.service.transport.codec import MessageCheck, StrictCodec
from pykv.service.transport.connection import ServerProtocol
from pykv.service.transport.handler import CallHandler
from pykv.service.transport.handshake import HandshakeFailure
from pykv.service.transport.limits import MethodLimits, TransportLimits
from pykv.service.transport.offence import Offence
from pykv.service.transport.peers import Peers
from pykv.service.transport.request_memory import RequestMemory
from pykv.service.transport.turns import Turns

__all__ = ["CallServer"]

CLOSE_SECONDS = 5.0
HANDSHAKE_SECONDS = 10.0
BACKLOG = 1024
STREAM_WINDOW_BYTES = 64 * 1024 - 1
"""What a call may send before its method reads; as much as HTTP/2 lets it send before it knows our settings."""


class CallServer(Server):
    """Listens, and knows its connections, so that they can be asked to end.

    Args:
        lines: where connections that are refused or sent away are told.
        check: of the bytes of each message, before it is decoded.
        limits_of: the bounds of a method, by its path; None = `max_message_bytes` for each.
    """

    def __init__(
        self,
        services: Collection[IServable],
        limits: TransportLimits,
        lines: BoundedLog,
        check: MessageCheck = lambda data, descriptor: None,
        limits_of: Callable[[str], MethodLimits] | None = None,
    ) -> None:
        super().__init__(
            services,
            codec=StrictCodec(check),
            status_details_codec=ProtoStatusDetailsCodec(),
            config=Configuration(
                _keepalive_time=None, http2_stream_window_size=STREAM_WINDOW_BYTES
            ),  # see Keepalive
        )
        self._limits = limits
        self._lines = lines
        self._connections: set[ServerProtocol] = set()
        self._peers = Peers(limits)
        self._turns = Turns()
        self._arrivals: Arrivals | None = None
        self._goodbye_seconds: float | None = None
        self._generation = 0
        self._memory = RequestMemory(limits.request_memory_bytes, STREAM_WINDOW_BYTES)
        self._limits_of = limits_of or (lambda path: MethodLimits(limits.max_message_bytes))

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Takes connections of a bound socket, which it owns from now on."""
        handshake_seconds = min(HANDSHAKE_SECONDS, self._limits.request_seconds)
        self._arrivals = Arrivals(
            listener, self._peers, self._make_protocol, self._take, tls, handshake_seconds, self._lines
        )
        self._server = cast(asyncio.AbstractServer, self._arrivals)
        self._server_closed_fut = self._loop.create_future()

    def renew(self, tls: ssl.SSLContext) -> None:
        """Takes further connections with this context; those that are open stay as they are."""
        if self._arrivals is not None:
            self._arrivals.tls = tls

    def send_certified_clients_away(self) -> None:
        """Asks clients that showed a certificate to come back by another connection, where it is verified anew.

        Their calls that run go on.
        """
        self._generation += 1
        for connection in list(self._connections):
            connection.leave_if_certified()

    @property
    def num_connections(self) -> int:
        """Connections that are open, those amid their TLS handshake among them."""
        return self._peers.num_open

    @property
    def num_refused(self) -> Mapping[str, int]:
        """Connections that were refused, by the name of the limit."""
        return self._peers.num_refused

    @property
    def num_closed(self) -> Mapping[Offence, int]:
        """Connections that were closed because of what their clients did."""
        return self._peers.num_closed

    @property
    def num_failed_handshakes(self) -> Mapping[HandshakeFailure, int]:
        """Connections whose TLS did not begin."""
        return self._peers.num_failed

    def stop_listening(self) -> None:
        """Takes no more connections; the handshakes that have begun go on."""
        if self._arrivals is not None:
            self._arrivals.close()

    async def say_goodbye(self, wait_seconds: float) -> None:
        """Asks all clients to begin no more calls here, and serves only those that begin within `wait_seconds`.

        Who is amid a handshake is asked once that is done, and has as long from then on.
        """
        self._goodbye_seconds = wait_seconds
        if not self.num_connections:
            return
        for connection in list(self._connections):
            connection.announce_end()
        await anyio.sleep(wait_seconds)
        for connection in list(self._connections):
            connection.refuse_further_calls()

    async def wait_begun(self) -> None:
        """Returns once whoever was amid a handshake at the goodbye has begun the calls that are served, or has left."""
        if self._arrivals is not None and self._arrivals.num_beginning:
            await self._arrivals.wait_closed()
            await anyio.sleep(self._goodbye_seconds or 0.0)

    async def end(self) -> None:
        """Cancels what still runs and closes every connection, in bounded time."""
        if self._arrivals is None:
            return
        self.stop_listening()
        self._arrivals.give_up()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._arrivals.wait_closed()  # who still begins is closed with the others
        self.close()
        await self._wait_for_handlers()
        for connection in list(self._connections):
            connection.close()
        with anyio.move_on_after(CLOSE_SECONDS):
            await self.wait_closed()
            for connection in list(self._connections):
                await connection.wait_closed()
        for connection in list(self._connections):
            connection.abort()

    async def _wait_for_handlers(self) -> None:
        with anyio.move_on_after(CLOSE_SECONDS):
            for handler in list(self._handlers):
                await handler.wait_closed()

    def _make_protocol(self, peer: str) -> ServerProtocol:
        self.__gc_step__()
        handler = CallHandler(
            self._mapping, self._codec, self._status_details_codec, self.__dispatch__, self._limits_of
        )
        self._handlers.add(handler)
        return ServerProtocol(
            handler,
            self._config,
            self._h2_config,
            self._limits,
            self._connections,
            self._peers,
            peer,
            self._turns,
            self._memory,
            self._lines,
            self._generation,
        )

    def _take(self, protocol: ServerProtocol) -> None:
        """Takes a connection that has begun; drops the handler of one that never will, which nothing else would do."""
        if not protocol.has_begun:
            self._handlers.discard(protocol.handler)
        elif self._goodbye_seconds is not None:
            protocol.announce_end()
            self._loop.call_later(self._goodbye_seconds, protocol.refuse_further_calls)
        elif protocol.generation != self._generation:
            protocol.leave_if_certified()
