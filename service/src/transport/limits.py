"""How much clients may ask of the transport."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MethodLimits", "TransportLimits"]


class MethodLimits(NamedTuple):
    """The bounds of one method's calls.

    Attributes:
        max_message_bytes: size of a request message.
        is_queued: whether who serves the calls bounds them from when their requests have come; the others count in the
            request memory until they end.
    """

    max_message_bytes: int
    is_queued: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """The bounds of all connections together, of one peer's, and of each.

    Args:
        max_connections: connections that are open at once.
        max_connections_per_peer: the same of one peer; so many it may make at once.
        connections_per_second: connections that one peer may make in the long run.
        request_seconds: how long a client may take for the connection's start, for one frame or block of headers, and
            for the request of a call, its end included; where a call has many messages, for each.
        max_streams: calls at once on one connection.
        max_message_bytes: size of one received message; a larger one is refused before it is read.
        request_memory_bytes: requests that are still coming in, of all connections together; who finds no room waits.
        stall_seconds: how long a client may leave what was sent to it unread.
        keepalive_seconds: after so long without a byte from the client it is asked, by a PING, whether it is there.
        keepalive_timeout_seconds: how long it may take to answer.
        keepalive_permit_without_calls: whether it is asked, and may ask, while it has no calls.
        min_ping_interval_seconds: between two PINGs of a client to which nothing was sent meanwhile.
        max_ping_strikes: PINGs that may come sooner; a connection with more is closed; 0 = any number.
        control_frames_burst, control_frames_per_second: resets and other frames that cost a client nearly nothing,
            at once and in the long run; a connection with more is closed.
    """

    max_connections: int = 4096
    max_connections_per_peer: int = 1024
    connections_per_second: float = 200.0
    request_seconds: float = 30.0
    max_streams: int = 4096
    max_message_bytes: int = 16 * 2**20
    request_memory_bytes: int = 256 * 2**20
    stall_seconds: float = 30.0
    keepalive_seconds: float = 30.0
    keepalive_timeout_seconds: float = 20.0
    keepalive_permit_without_calls: bool = True
    min_ping_interval_seconds: float = 5.0
    max_ping_strikes: int = 2
    control_frames_burst: int = 1000
    control_frames_per_second: float = 200.0
