"""The end of a connection whose client must show its certificate again."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import time
from typing import Any

__all__ = ["Departure"]

NOTICE_SECONDS = 0.1
"""As long calls that are on their way while the client learns of it are still served."""
LONGEST_WAIT_SECONDS = 3600.0
"""The clock may be set, or the machine sleep, meanwhile."""


class Departure:
    """Asks a client to leave when its certificate ends, or before.

    Args:
        certificate: which the client has shown, as `SSLSocket.getpeercert` has it; None or empty = none.
        announce: asks the client to begin no more calls on the connection.
        refuse: serves no call that begins from now on, and ends the connection with the last.
    """

    def __init__(
        self,
        certificate: Mapping[str, Any] | None,
        announce: Callable[[], None],
        refuse: Callable[[], None],
    ) -> None:
        self._announce, self._refuse = announce, refuse
        self._expires_at = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """The connection has begun; it may be one of a TLS session whose certificate has ended meanwhile."""
        if self._expires_at is None:
            return
        if self._expires_at < time():
            self._has_begun = True
            self._refuse()
        else:
            self._wait_for(self._expires_at)

    @property
    def has_certificate(self) -> bool:
        """Whether the client has shown a certificate."""
        return self._expires_at is not None

    def begin(self) -> None:
        """Asks the client, once, to leave."""
        if not self._has_begun:
            self._has_begun = True
            self._announce()
            self._call_later(NOTICE_SECONDS, self._refuse)

    def cancel(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait_for(self, expires_at: float) -> None:
        left = expires_at - time()
        if left < 0.0:
            self.begin()
        else:
            self._call_later(min(left + 0.01, LONGEST_WAIT_SECONDS), self._wait_for, expires_at)

    def _call_later(self, seconds: float, call: Callable[..., None], *arguments: float) -> None:
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, call, *arguments)
