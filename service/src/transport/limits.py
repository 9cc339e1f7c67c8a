"""How much one client may ask of the transport."""

from dataclasses import dataclass

__all__ = ["TransportLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """The bounds of every connection.

    Args:
        max_streams: calls at once on one connection.
        max_message_bytes: size of one received message; a larger one is refused before it is read.
        stall_seconds: how long a client may leave what was sent to it unread.
        keepalive_seconds: how often a connection with calls is probed; a peer that is gone is noticed
            after that and `KEEPALIVE_TIMEOUT_SECONDS`.
        control_frames_burst, control_frames_per_second: resets and other frames that cost a client nearly nothing,
            at once and in the long run; a connection with more is closed.
    """

    max_streams: int = 4096
    max_message_bytes: int = 16 * 2**20
    stall_seconds: float = 30.0
    keepalive_seconds: float = 30.0
    control_frames_burst: int = 1000
    control_frames_per_second: float = 200.0
