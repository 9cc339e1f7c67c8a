"""What a client sees when a call fails: the exception that the server raised, where pykv has its class."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpclib.client import Stream
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from pykv.errors import (
    CapacityError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    OutOfBlocksError,
    PoisonedError,
    PykvError,
    QueueFullError,
)
from pykv.service.client.tls_failures import Reason, TlsTrouble, why_not_connected
from pykv.service.status import ERROR_KEY, FIELD_KEY, RETRY_KEY, printable

__all__ = ["ConnectionEndedError", "ServiceError", "raising_typed"]

MOST_CHARACTERS = 1000
"""Of what a server says of a failure: more than `pykv-serve` sends, as proxies answer too."""
MOST_RETRY_DIGITS = 8
"""A hint to come back in more than a day is none."""
MOST_FIELD_CHARACTERS = 64

RAISED_AGAIN: Mapping[str, type[PykvError]] = {
    kind.__name__: kind
    for kind in (
        CapacityError,
        DuplicateRequestError,
        EngineDeadError,
        InvalidRequestError,
        OutOfBlocksError,
        PoisonedError,
        QueueFullError,
    )
}


class ServiceError(PykvError):
    """A call failed for a reason that has no class of its own.

    Attributes:
        status: the name of the gRPC status, such as "UNAVAILABLE".
        message: what the error says, without the status.
        retry_seconds: after so long the call may be tried again, where the server said so.
        tls_trouble: what may be amiss with TLS; None: nothing.
    """

    def __init__(
        self,
        message: str,
        status: str,
        retry_seconds: float | None = None,
        *,
        tls_trouble: TlsTrouble | None = None,
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.retry_seconds = retry_seconds
        self.tls_trouble = tls_trouble


class ConnectionEndedError(StreamTerminatedError):
    """A call was ended from outside; it carries why through grpclib, which looks for the class above."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@contextmanager
def raising_typed(stream: Stream[Any, Any], address: str, *, is_tls: bool) -> Iterator[None]:
    """Raises a call's failures as the exceptions of pykv.

    Raises:
        PykvError: the class that the server named, or ServiceError.
        TimeoutError: the deadline passed.
    """
    try:
        with _uncancelled(stream):
            yield
    except GRPCError as error:
        message = printable(error.message or "", MOST_CHARACTERS)
        raise _typed(error.status, message, _trailers_of(stream)) from error
    except ConnectionEndedError as error:
        raise _unavailable(error.reason) from error
    except StreamTerminatedError as error:
        raise ServiceError(str(error), Status.UNAVAILABLE.name) from error
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        raise _unavailable(why_not_connected(error, address, is_tls=is_tls)) from error


def _unavailable(reason: Reason) -> ServiceError:
    return ServiceError(reason.text, Status.UNAVAILABLE.name, tls_trouble=reason.trouble)


@contextmanager
def _uncancelled(stream: Stream[Any, Any]) -> Iterator[None]:
    """Takes back that grpclib cancels a task to wake it: the next timeout of that task would count it."""
    try:
        yield
    except Exception:
        wrapper, task = getattr(stream, "_wrapper", None), asyncio.current_task()
        if task is not None and wrapper is not None and wrapper.cancel_failed is False:
            task.uncancel()
        raise


def _typed(status: Status, message: str, trailers: Mapping[str, str]) -> Exception:
    if status is Status.DEADLINE_EXCEEDED:
        return TimeoutError(message)
    kind = RAISED_AGAIN.get(trailers.get(ERROR_KEY, ""))
    retry_seconds = _seconds_of(trailers.get(RETRY_KEY, ""))
    if kind is None:
        return ServiceError(message, status.name, retry_seconds)
    if kind is QueueFullError:
        return QueueFullError(message, retry_seconds)
    if issubclass(kind, InvalidRequestError):
        return kind(message, _field_of(trailers.get(FIELD_KEY, "")))
    return kind(message)


def _seconds_of(milliseconds: str) -> float | None:
    """The server's hint; None where it is no number, or too long to be one."""
    is_number = milliseconds.isascii() and milliseconds.isdigit()
    return int(milliseconds) / 1000 if is_number and len(milliseconds) <= MOST_RETRY_DIGITS else None


def _field_of(name: str) -> str | None:
    """The field that the server names; None where it names none, or what cannot be one."""
    is_name = name.isascii() and name.isidentifier() and len(name) <= MOST_FIELD_CHARACTERS
    return name if is_name else None


def _trailers_of(stream: Stream[Any, Any]) -> Mapping[str, str]:
    """The raw trailers: grpclib does not decode them where a reset follows at once."""
    inner = getattr(stream, "_stream", None)
    headers: Iterable[tuple[str, str]] = () if inner is None else inner.trailers or inner.headers or ()
    return dict(headers)
