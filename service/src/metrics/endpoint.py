"""The HTTP endpoint that Prometheus scrapes."""

import errno
import socket
import threading
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from time import sleep
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import anyio
import anyio.to_thread
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from pykv.errors import ConfigError

__all__ = ["MetricsEndpoint"]

PATH = "/metrics"
RETRY_SECONDS = 0.5
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """A thread for each scrape; where no file is left to take one with, it tries again a moment later."""

    daemon_threads = True

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


class ScrapeHandler(WSGIRequestHandler):
    """Answers one scrape."""

    def log_message(self, *_: object) -> None:
        """Says nothing: scrapes come all the time."""


class MetricsEndpoint:
    """Answers scrapes on threads of its own, so that a busy event loop cannot keep them waiting.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server = _listen(host, port, _at_path(make_wsgi_app(registry)))
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
    """Answers at the metrics' path only."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing is here; the metrics are at {PATH}\n".encode()]

    return answer
