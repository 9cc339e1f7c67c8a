"""One write to the socket for all that one turn of the event loop has to send."""

import asyncio
from typing import Any, cast

import structlog

__all__ = ["TickWriter"]

LINGER_SECONDS = 2.0

log = structlog.get_logger("pykv.service")


class TickWriter:
    """Stands before a transport: collects one turn's writes, and closes in bounded time."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def as_transport(self) -> asyncio.Transport:
        """Itself, for the signatures that name asyncio's class."""
        return cast(asyncio.Transport, self)

    def write(self, data: bytes) -> None:
        """Sends `data` at the end of this turn of the loop."""
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(data)

    def flush(self) -> None:
        """Sends what waits; to a transport that is closed, nothing."""
        pending, self._pending = self._pending, []
        if not pending or self._transport.is_closing():
            return
        try:
            self._transport.write(b"".join(pending))
        except RuntimeError as error:  # uvloop's, where the socket is closed but the transport was never told
            log.warning("connection closed", reason=str(error))
            self._transport.abort()

    def close(self) -> None:
        """Sends what waits and closes; a peer that takes longer than LINGER_SECONDS is cut off.

        It may not take what is sent, or, under TLS, never answer the goodbye.
        """
        self.flush()
        self._transport.close()
        self._loop.call_later(LINGER_SECONDS, self._transport.abort)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
