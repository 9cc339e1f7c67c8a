"""What a call's headers must be, before anything is done for it."""

import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grpclib.const import Handler, Status
from grpclib.metadata import decode_bin_value

__all__ = [
    "MAX_HEADER_BYTES",
    "NO_MESSAGE",
    "SEVERAL_MESSAGES",
    "HeaderFault",
    "fault_of",
    "is_malformed",
    "size_of",
]

MAX_HEADER_BYTES = 16 * 1024
FIELD_BYTES = 32  # what HTTP/2 counts for a field beside its name and its value
PSEUDO_HEADERS = (":method", ":scheme", ":path")
KNOWN_PSEUDO_HEADERS = frozenset((*PSEUDO_HEADERS, ":authority"))
OF_ONE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)
SINGLE = frozenset(("authorization", "content-type", "grpc-encoding", "grpc-timeout", "te"))
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
FORBIDDEN_IN_VALUES = re.compile(r"[\0\r\n]")
CONTENT_TYPES = ("application/grpc", "application/grpc+proto")
TIMEOUT = re.compile(r"[0-9]{1,8}[HMSmun]")
NO_MESSAGE = "the call has no request message: allowed is one"
SEVERAL_MESSAGES = "the call has several request messages: allowed is one"

Headers = Sequence[tuple[str, str]]


class HeaderFault(NamedTuple):
    """Why a call cannot begin.

    Attributes:
        kind: of few values, for the log.
        status: with which the call ends; None where it is no call at all, and the stream is reset.
        retry_seconds: after how long the call may be tried again; None where that would not help.
    """

    kind: str
    status: Status | None
    message: str
    http_status: str = "200"
    retry_seconds: float | None = None


def fault_of(headers: Headers, methods: Mapping[str, Handler], *, has_ended: bool) -> HeaderFault | None:
    """What is wrong with the headers of a call.

    Args:
        methods: those that are served, by their path.
        has_ended: the headers are all that the client sends.
    """
    values = dict(headers)
    missing = [name for name in PSEUDO_HEADERS if name not in values]
    if missing:
        return HeaderFault("malformed", None, f"the headers lack {', '.join(missing)}")
    num_bytes = size_of(headers)
    if num_bytes > MAX_HEADER_BYTES:
        message = (
            f"headers of {num_bytes} bytes: allowed is {MAX_HEADER_BYTES}, {FIELD_BYTES} a field included"
        )
        return HeaderFault("large", Status.RESOURCE_EXHAUSTED, message)
    if is_malformed(headers, num_pseudo_headers=len(values.keys() & KNOWN_PSEUDO_HEADERS)):
        return HeaderFault("malformed", None, "HTTP/2 forbids a name, a value or the order of the headers")
    return (
        _metadata_fault(headers, values)
        or _protocol_fault(values)
        or _method_fault(values, methods, has_ended)
    )


def size_of(headers: Headers) -> int:
    """Their bytes as HTTP/2 counts them."""
    return sum(len(name) + len(value) + FIELD_BYTES for name, value in headers)


def is_malformed(headers: Headers, num_pseudo_headers: int = 0) -> bool:
    """Whether HTTP/2 forbids them, as RFC 9113, 8.2 and 8.3 have it, what is no ASCII in a value left out.

    Args:
        num_pseudo_headers: how many are allowed, and must come first.
    """
    first, others = headers[:num_pseudo_headers], headers[num_pseudo_headers:]
    if not all(name in KNOWN_PSEUDO_HEADERS for name, _ in first):
        return True
    if any(FORBIDDEN_IN_VALUES.search(value) for _, value in headers):
        return True
    return any(name in OF_ONE_CONNECTION or not NAME.fullmatch(name) for name, _ in others)


def _metadata_fault(headers: Headers, values: Mapping[str, str]) -> HeaderFault | None:
    for name, value in headers:
        problem = _problem_of(name, value)
        if problem is not None:
            return HeaderFault("metadata", Status.INVALID_ARGUMENT, f"the metadata {name!a} {problem}")
    if len(values) < len(headers):
        names = [name for name, _ in headers if name in SINGLE]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            message = f"the metadata {twice[0]!a} is there {twice.count(twice[0])} times: allowed is once"
            return HeaderFault("metadata", Status.INVALID_ARGUMENT, message)
    return None


def _problem_of(name: str, value: str) -> str | None:
    if not value.isascii():
        return "is not ASCII: allowed is ASCII, or base64 under a name that ends in -bin"
    if name.endswith("-bin") and not name.startswith("grpc-") and not _is_base64(value):
        return "is not base64"
    if name == "grpc-timeout" and not TIMEOUT.fullmatch(value):
        return f"is {value[:20]!a}: allowed are 1 to 8 digits and one of H M S m u n"
    return None


def _is_base64(value: str) -> bool:
    """Whether it is base64, padded or not, or such values with a comma between them, and grpclib can decode it."""
    try:
        for part in value.split(","):
            b64decode(part + "=" * (-len(part) % 4), validate=True)
        decode_bin_value(value.encode())
    except ValueError:
        return False
    return True


def _protocol_fault(values: Mapping[str, str]) -> HeaderFault | None:
    """Whether it is another protocol's; the answers are those that gRPC names."""
    if values[":method"] != "POST":
        return HeaderFault("no grpc", Status.UNKNOWN, "the method is not POST", "405")
    if values.get("content-type") not in CONTENT_TYPES:
        return HeaderFault("no grpc", Status.UNKNOWN, "the content-type is not application/grpc", "415")
    if values.get("te") != "trailers":
        return HeaderFault("no grpc", Status.UNKNOWN, 'the header "te: trailers" is missing', "400")
    return None


def _method_fault(
    values: Mapping[str, str], methods: Mapping[str, Handler], has_ended: bool
) -> HeaderFault | None:
    method = methods.get(values[":path"])
    if method is None:
        return HeaderFault("no method", Status.UNIMPLEMENTED, "the method is not served here")
    if has_ended and not method.cardinality.client_streaming:
        return HeaderFault("no message", Status.INVALID_ARGUMENT, NO_MESSAGE)
    return None
