"""The HTTP endpoint that Prometheus scrapes."""

import errno
import re
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from socketserver import ThreadingMixIn
from time import monotonic, sleep
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import anyio
import anyio.to_thread
from prometheus_client import make_wsgi_app
from prometheus_client.registry import Collector

from pykv.errors import ConfigError
from pykv.service.files import shown
from pykv.service.metrics.named_families import NamedFamilies

__all__ = ["MetricsEndpoint"]

PATH = "/metrics"
ACCEPTED = "text/plain;version=0.0.4"
"""The one format that is given: the library's others write a name's colon as an underscore, or quote the name."""
PLAIN, ALLOW = ("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET, HEAD, OPTIONS")
SERVER = re.compile(r"^https?://[^/?]*", re.IGNORECASE)
RETRY_SECONDS = 0.5
MAX_SCRAPES = 16
ROOM_SECONDS = 0.5
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 10.0
MAX_HEAD_BYTES = 16 * 1024
END_OF_HEAD = b"\r\n\r\n"
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Silent:
    """The connections whose request has not come yet, in the order in which they were accepted."""

    def __init__(self) -> None:
        self._connections: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Waits for its request."""
        with self._lock:
            self._connections[connection] = None

    def discard(self, connection: socket.socket) -> None:
        """Its request has come, or never will."""
        with self._lock:
            self._connections.pop(connection, None)

    def end_oldest(self) -> None:
        """Gives up the one that has been silent for longest; its thread ends."""
        with self._lock:
            oldest = next(iter(self._connections), None)
            if oldest is not None:
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """A thread for each scrape, MAX_SCRAPES at most: one more takes the place of one that has not asked yet.

    Where no file is left to take one with, it tries again a moment later.
    """

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.silent = Silent()
        self._room = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__(*args, **kwargs)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a scrape.

        Raises:
            OSError: none can be accepted; the server's loop, which would ask again at once, has been held up.
        """
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in SCARCE:
                sleep(RETRY_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins a thread for a scrape, or closes its connection where all that run have asked and are not done."""
        if not self._room.acquire(blocking=False):
            self.silent.end_oldest()
            if not self._room.acquire(timeout=ROOM_SECONDS):
                self.shutdown_request(request)
                return
        self.silent.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one scrape."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a peer that left or was given up."""

    def _leave(self, request: socket.socket) -> None:
        self.silent.discard(request)
        self._room.release()


class ScrapeHandler(WSGIRequestHandler):
    """Answers one scrape, whose request must come in time and be short."""

    server: ScrapeServer

    def handle(self) -> None:
        """Reads the whole request first."""
        head = self._head()
        self.server.silent.discard(self.connection)
        if head is not None:
            self.connection.settimeout(ANSWER_SECONDS)
            self.rfile = BytesIO(head)
            super().handle()

    def _head(self) -> bytes | None:
        """All up to the empty line; None where it did not come."""
        due, head = monotonic() + REQUEST_SECONDS, b""
        with suppress(OSError):
            while END_OF_HEAD not in head and len(head) < MAX_HEAD_BYTES:
                self.connection.settimeout(max(due - monotonic(), 0.001))
                data = self.connection.recv(MAX_HEAD_BYTES - len(head))
                if not data:
                    return None
                head += data
            return head if END_OF_HEAD in head else None
        return None

    def get_environ(self) -> WSGIEnvironment:
        """A proxy may name the server in the request's target, which is not looked at."""
        self.path = SERVER.sub("", self.path)
        return super().get_environ()

    def log_message(self, *_: object) -> None:
        """Says nothing: scrapes come all the time."""


class MetricsEndpoint:
    """Answers scrapes on threads of its own, so that a busy event loop cannot keep them waiting.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = NamedFamilies()
        registry.register(collector)
        try:
            self._server = _listen(host, port, _answering_head(_at_path(make_wsgi_app(registry))))
        except OSError as error:
            raise ConfigError(
                f"metrics cannot listen on {host}, port {port}: {error.strerror or error}"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="pykv-metrics", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the endpoint; scrapes that hang are left behind."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        """HOST:PORT that is listened on."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, (bytes, bytearray)) else str(host)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _listen(host: str, port: int, app: WSGIApplication) -> ScrapeServer:
    """A server of the address family that `host` is of."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]

    class OfFamily(ScrapeServer):
        address_family = family

    return make_server(str(address[0]), port, app, OfFamily, ScrapeHandler)


def _at_path(metrics: WSGIApplication) -> WSGIApplication:
    """Answers at the metrics' path only, in the one format whatever others the scraper would take."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [PLAIN])
            return [f"nothing is here; the metrics are at {PATH}\n".encode()]
        method = environ["REQUEST_METHOD"]
        if method == "GET":
            return metrics(environ | {"HTTP_ACCEPT": ACCEPTED}, start_response)
        if method == "OPTIONS":
            start_response("200 OK", [ALLOW])
            return []
        start_response("405 Method Not Allowed", [PLAIN, ALLOW])
        return [f"the metrics are for GET and HEAD, and not for {shown(method)}\n".encode()]

    return answer


def _answering_head(app: WSGIApplication) -> WSGIApplication:
    """Answers HEAD by the headers that GET would have."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return app(environ, start_response)
        told: list[tuple[str, list[tuple[str, str]]]] = []
        written: list[bytes] = []

        def note(status: str, headers: list[tuple[str, str]], _: object = None) -> Callable[[bytes], object]:
            told.append((status, headers))
            return written.append

        num_bytes = sum(map(len, app(environ | {"REQUEST_METHOD": "GET"}, note)), sum(map(len, written)))
        (status, headers), *_ = told
        start_response(status, [*headers, ("Content-Length", str(num_bytes))])
        return []

    return answer
