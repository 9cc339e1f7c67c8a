"""The HTTP endpoint that Prometheus scrapes."""

import threading
from collections.abc import Iterable
from typing import Self
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import anyio
import anyio.to_thread
from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.registry import Collector

from pykv.errors import ConfigError

__all__ = ["MetricsEndpoint"]

PATH = "/metrics"


class MetricsEndpoint:
    """Answers scrapes on threads of its own, so that a busy event loop cannot keep them waiting.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot listen on {host}, port {port}: {error.strerror or error}"
            ) from error
        self._server.set_app(_at_path(make_wsgi_app(registry)))

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


def _at_path(metrics: WSGIApplication) -> WSGIApplication:
    """Answers at the metrics' path only."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing is here; the metrics are at {PATH}\n".encode()]

    return answer
