"""Takes connections from the listening socket: each is counted before anything is done for it, TLS included."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import structlog
from h2.errors import ErrorCodes
from hyperframe.frame import SettingsFrame

from pykv.service.bounded_log import BoundedLog
from pykv.service.transport.connection import ServerProtocol
from pykv.service.transport.goaway import goaway
from pykv.service.transport.handshake import ClientHello, HandshakeFailure
from pykv.service.transport.peers import Peers, peer_of

__all__ = ["Arrivals"]

ACCEPTS_A_TURN = 64
RETRY_SECONDS = 1.0
ERROR_CHARACTERS = 200

log = structlog.get_logger("pykv.service")


class Arrivals:
    """Accepts connections from now on, until it is closed.

    asyncio's own server says nothing of a connection before its handshake is done. The two methods are those of it that
    grpclib calls.

    Args:
        listener: a bound socket, which it owns.
        peers: count the connections, and refuse some.
        make_protocol: makes the protocol of an admitted connection of a peer.
        take: given each protocol once its connection has begun, or is closed because it never will.
        handshake_seconds: how long TLS may take to begin.
        lines: where refusals and handshakes that failed are told.

    Attributes:
        tls: what the connections that still come begin with; None = plain text.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Peers,
        make_protocol: Callable[[str], ServerProtocol],
        take: Callable[[ServerProtocol], None],
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
        lines: BoundedLog,
    ) -> None:
        listener.setblocking(False)
        self.tls = tls
        self._listener = listener
        self._peers = peers
        self._make_protocol = make_protocol
        self._take = take
        self._lines = lines
        self._handshake_seconds = handshake_seconds
        self._beginning: dict[asyncio.Task[None], ServerProtocol] = {}
        self._loop = asyncio.get_running_loop()
        self._listen()

    @property
    def num_beginning(self) -> int:
        """Connections that were accepted and have not begun."""
        return len(self._beginning)

    def close(self) -> None:
        """Takes no more connections; those that were accepted may begin."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def give_up(self) -> None:
        """Closes those that are amid their handshake.

        A connection in plain text begins in the loop's next turn, and one that has begun is open like any other:
        uvloop would close the socket of a task that is cancelled then, and never say that the connection is lost.
        """
        if self.tls is None:
            return
        for task, protocol in self._beginning.items():
            if not protocol.has_begun:
                task.cancel()

    async def wait_closed(self) -> None:
        """Returns once each connection that was accepted has begun or is closed."""
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Takes those that wait, but not so many that all else waits for it."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no more files, most often
                log.error("no connection can be accepted", error=str(error))
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_SECONDS, self._listen)
                return
            connection.setblocking(False)
            self._admit(connection, peer_of(address))

    def _admit(self, connection: socket.socket, peer: str) -> None:
        limit = self._peers.admit(peer)
        if limit is not None:
            self._refuse(connection, peer, limit)
            return
        protocol = self._make_protocol(peer)
        task = asyncio.create_task(self._begin(connection, protocol, peer))
        self._beginning[task] = protocol
        task.add_done_callback(lambda task: self._has_begun(task, protocol, peer))

    def _refuse(self, connection: socket.socket, peer: str, limit: str) -> None:
        """Says why, in the only way that HTTP/2 has, and closes; under TLS that would cost a handshake."""
        self._lines.write("info", "connection refused", {"limit": limit}, peer=peer)
        with connection, suppress(OSError):
            if self.tls is None:
                reason = goaway(0, ErrorCodes.ENHANCE_YOUR_CALM, f"{limit} is reached")
                connection.send(SettingsFrame(0).serialize() + reason)

    async def _begin(self, connection: socket.socket, protocol: ServerProtocol, peer: str) -> None:
        tls = self.tls
        hello = None if tls is None else ClientHello.expect(tls)
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else self._handshake_seconds,
            )
        except OSError as error:  # the socket is closed
            if hello is not None:
                self._tell(HandshakeFailure.of(error, hello), peer, error)

    def _tell(self, failure: HandshakeFailure, peer: str, error: OSError) -> None:
        """Counts a handshake that failed; who only looks whether the port is open, as probes do, is no news."""
        self._peers.count_failed(failure)
        level = "debug" if failure is HandshakeFailure.LEFT else "info"
        text = str(error)[:ERROR_CHARACTERS] or failure.value
        self._lines.write(level, "TLS handshake failed", {"cause": failure.label}, peer=peer, error=text)

    def _has_begun(self, task: "asyncio.Task[None]", protocol: ServerProtocol, peer: str) -> None:
        del self._beginning[task]
        if not protocol.has_begun:  # else it leaves when it is lost
            self._peers.leave(peer)
        self._take(protocol)
