"""What a call's headers must be, before anything is done for it."""

from collections.abc import Sequence
from typing import NamedTuple

from grpclib.const import Status
from grpclib.metadata import decode_bin_value

__all__ = ["MAX_HEADER_BYTES", "HeaderFault", "fault_of"]

MAX_HEADER_BYTES = 16 * 1024
FIELD_BYTES = 32  # what HTTP/2 counts for a field beside its name and its value
PSEUDO_HEADERS = (":method", ":scheme", ":path")


class HeaderFault(NamedTuple):
    """Why a call cannot begin.

    Attributes:
        status: with which the call ends; None where it is no call at all, and the stream is reset.
    """

    status: Status | None
    message: str


def fault_of(headers: Sequence[tuple[str, str]]) -> HeaderFault | None:
    """What is wrong with them: for such as grpclib would not answer, or that are too large."""
    names = {name for name, _ in headers}
    missing = [name for name in PSEUDO_HEADERS if name not in names]
    if missing:
        return HeaderFault(None, f"the headers lack {', '.join(missing)}")
    num_bytes = sum(len(name) + len(value) + FIELD_BYTES for name, value in headers)
    if num_bytes > MAX_HEADER_BYTES:
        message = f"headers of {num_bytes} bytes; allowed: {MAX_HEADER_BYTES}, {FIELD_BYTES} a field included"
        return HeaderFault(Status.RESOURCE_EXHAUSTED, message)
    for name, value in headers:
        problem = _problem_of(name, value)
        if problem is not None:
            return HeaderFault(Status.INVALID_ARGUMENT, f"the metadata {name!a} {problem}")
    return None


def _problem_of(name: str, value: str) -> str | None:
    if not (name.isascii() and value.isascii()):
        return "is not ASCII; allowed: ASCII, or base64 under a name that ends in -bin"
    if name.endswith("-bin") and not name.startswith("grpc-"):
        try:
            decode_bin_value(value.encode())
        except ValueError:
            return "is not base64"
    return None
