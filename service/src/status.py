"""How an exception becomes a status: one table, and texts that are safe to send."""

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo
from grpclib.const import Status
from grpclib.exceptions import GRPCError

import pykv.errors
from pykv.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    OutOfBlocksError,
    PykvError,
    QueueFullError,
)
from pykv.service.errors import (
    ClientTooSlowError,
    EngineStalledError,
    ForbiddenError,
    ModelLoadingError,
    NotServedError,
    RequestMemoryError,
    ShuttingDownError,
    TenantLimitError,
    UnauthenticatedError,
)

__all__ = [
    "ERROR_KEY",
    "FIELD_KEY",
    "RETRY_KEY",
    "error_metadata",
    "innermost",
    "is_unexpected",
    "message_of",
    "printable",
    "retry_details",
    "retry_metadata",
    "retry_seconds_of",
    "status_of",
]

STATUSES: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidRequestError, Status.INVALID_ARGUMENT),
    (DuplicateRequestError, Status.ALREADY_EXISTS),
    (QueueFullError, Status.RESOURCE_EXHAUSTED),
    (OutOfBlocksError, Status.RESOURCE_EXHAUSTED),
    (ClientTooSlowError, Status.RESOURCE_EXHAUSTED),
    (TenantLimitError, Status.RESOURCE_EXHAUSTED),
    (RequestMemoryError, Status.RESOURCE_EXHAUSTED),
    (UnauthenticatedError, Status.UNAUTHENTICATED),
    (ForbiddenError, Status.PERMISSION_DENIED),
    (TimeoutError, Status.DEADLINE_EXCEEDED),
    (EngineDeadError, Status.UNAVAILABLE),
    (EngineStalledError, Status.UNAVAILABLE),
    (ModelLoadingError, Status.UNAVAILABLE),
    (ShuttingDownError, Status.UNAVAILABLE),
    (NotServedError, Status.UNIMPLEMENTED),
    (PykvError, Status.INTERNAL),
)

ERROR_KEY = "pykv-error"
"""Trailing metadata: the class of `pykv.errors` that was raised."""
FIELD_KEY = "pykv-field"
"""Trailing metadata: the field of the request that was refused."""

RETRY_KEY = "retry-after-ms"
"""Trailing metadata: after how many milliseconds a refused call may be tried again."""

MESSAGE_CHARACTERS = 300
RETRY_SECONDS = 1.0
LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 0.1, 30.0
"""Bounds of every hint: what is said of later than that is a guess, and who comes in vain is told again."""
RETRYABLE = (ModelLoadingError, ShuttingDownError, RequestMemoryError)


def innermost(error: BaseException) -> BaseException:
    """The exception that a task group wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: BaseException) -> Status:
    """The status of a call that ended with `error`."""
    if isinstance(error, GRPCError):
        return error.status
    return next((status for kind, status in STATUSES if isinstance(error, kind)), Status.INTERNAL)


def is_unexpected(error: BaseException) -> bool:
    """Whether nobody foresaw `error`: the log gets its traceback and the client gets no detail."""
    return not isinstance(error, (GRPCError, *(kind for kind, _ in STATUSES)))


def message_of(error: BaseException) -> str:
    """A text for the client: short, printable, and never more of the request than one value."""
    if isinstance(error, GRPCError):
        text = error.message or ""
    elif isinstance(error, TimeoutError):
        text = "the deadline passed"
    elif is_unexpected(error):
        text = "internal error; the daemon's log has it"
    else:
        text = str(error.args[0]) if error.args else type(error).__name__
    return printable(text, MESSAGE_CHARACTERS)


def error_metadata(error: BaseException) -> dict[str, str]:
    """Trailing metadata by which a client raises the same class again."""
    metadata = {}
    name = type(error).__name__
    if name in pykv.errors.__all__:
        metadata[ERROR_KEY] = name
    field = getattr(error, "field", None)
    if isinstance(field, str) and field.isidentifier() and field.isascii():
        metadata[FIELD_KEY] = field
    return metadata


def retry_seconds_of(error: BaseException, queue_seconds: float) -> float | None:
    """After how long a call that was refused may be tried again; None where that would not help.

    Args:
        queue_seconds: what to say of a full queue.
    """
    if isinstance(error, TenantLimitError):
        seconds = error.retry_seconds
    elif isinstance(error, QueueFullError):
        seconds = queue_seconds
    elif isinstance(error, RETRYABLE):
        seconds = RETRY_SECONDS
    else:
        return None
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)


def retry_metadata(seconds: float) -> dict[str, str]:
    """Trailing metadata for clients that read no details of a status."""
    return {RETRY_KEY: str(math.ceil(seconds * 1000))}


def retry_details(seconds: float) -> list[Message]:
    """The same for `grpc-status-details-bin`."""
    nanos = math.ceil(seconds * 1000) * 1_000_000
    return [RetryInfo(retry_delay=Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))]


def printable(text: str, most: int) -> str:
    """At most so many characters of a text; what a terminal might obey or cannot show becomes "?"."""
    if len(text) > most:
        text = text[: most - 3] + "..."
    return "".join(character if character.isprintable() else "?" for character in text)
