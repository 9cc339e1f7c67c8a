"""HTTP/2's goodbye."""

from h2.errors import ErrorCodes
from hyperframe.frame import GoAwayFrame

__all__ = ["goaway"]


def goaway(last_stream_id: int, error_code: ErrorCodes = ErrorCodes.NO_ERROR, reason: str = "") -> bytes:
    """The frame, made without h2, which would take the connection for closed."""
    frame = GoAwayFrame(0)
    frame.last_stream_id = last_stream_id
    frame.error_code = error_code
    frame.additional_data = reason.encode()
    return bytes(frame.serialize())
