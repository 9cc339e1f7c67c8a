"""The socket that the daemon listens on."""

import errno
import socket

from pykv.errors import ConfigError
from pykv.service.transport.server import BACKLOG

__all__ = ["address_of", "bind"]


def bind(host: str, port: int) -> socket.socket:
    """Binds one socket to the first address of `host`; port 0 takes a free one.

    Raises:
        ConfigError: the host is unknown, or the port is in use or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use: allowed is a free port, or 0 for any"
            ) from error
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def address_of(listener: socket.socket) -> str:
    """HOST:PORT by which clients reach the socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
