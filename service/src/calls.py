"""The calls in flight: each is run under one guard, which answers for whatever ends it."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anyio
import structlog
from grpclib._typing import IServable
from grpclib.const import Handler, Status
from grpclib.server import Stream
from h2.exceptions import StreamClosedError

from pykv.service.bounded_log import BoundedLog
from pykv.service.status import (
    error_metadata,
    innermost,
    is_unexpected,
    message_of,
    retry_details,
    retry_metadata,
    retry_seconds_of,
    status_of,
)
from pykv.service.transport.stream import BoundedStream

__all__ = ["AnyStream", "Calls", "guarded"]

AnyStream = Stream[Any, Any]
Method = Callable[[AnyStream], Awaitable[None]]
Admission = Callable[[AnyStream], AbstractContextManager[None]]

PACE_CALLS = 64

log = structlog.get_logger("pykv.service")


class Call:
    """One call in flight."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout = asyncio.timeout(timeout_seconds)
        self._error: BaseException = TimeoutError()
        self._is_running = False

    def end(self, error: BaseException) -> None:
        """Cancels the call, unless it has ended; its client gets the status of `error`."""
        if self._is_running and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def run(self, running: Awaitable[None]) -> None:
        """Waits for the call.

        Raises:
            BaseException: what `end` was given, TimeoutError where the deadline passed, or what the call raised.
        """
        try:
            async with self._timeout:
                self._is_running = True
                await running
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise self._take_error() from None
        finally:
            self._is_running = False

    def _take_error(self) -> BaseException:
        """The call lets go of it: its traceback holds the call."""
        error, self._error = self._error, TimeoutError()
        return error


class Pace:
    """How fast calls end, as far as the last of them tell."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=PACE_CALLS)

    def end(self) -> None:
        """A call has ended."""
        self._ends.append(time.monotonic())

    def seconds_until_half_have_ended(self, num_calls: int) -> float:
        """In what time half of so many calls end at the present pace; 0 where there is none yet."""
        if len(self._ends) < 2:
            return 0.0
        seconds_a_call = (time.monotonic() - self._ends[0]) / len(self._ends)
        return num_calls / 2 * seconds_a_call


class Calls:
    """The calls in flight of one or more services.

    Args:
        lines: where refusals are told.
    """

    def __init__(self, lines: BoundedLog) -> None:
        self._lines = lines
        self._calls: set[Call] = set()
        self._ended = anyio.Event()
        self._pace = Pace()
        self._by_status: Counter[str] = Counter()
        self._refusal: BaseException | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def ended_by_status(self) -> dict[str, int]:
        """How many calls have ended, by the name of their status; those that their clients left as CANCELLED."""
        return dict(self._by_status)

    def end_all(self, error: BaseException) -> None:
        """Ends every call with the status of `error`."""
        for call in self._calls:
            call.end(error)

    async def close(self, error: BaseException, wait_seconds: float) -> None:
        """Ends every call with the status of `error`, and those that still begin, and waits a while for their ends."""
        self._refusal = error
        self.end_all(error)
        with anyio.move_on_after(wait_seconds, shield=True):
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Returns when no call is in flight."""
        while self._calls:
            self._ended = anyio.Event()
            await self._ended.wait()

    async def run(self, stream: AnyStream, method: Method) -> None:
        """Runs one call to its end and sends its status.

        What cancels the task itself (a reset, a lost connection) goes through: nobody is left to answer.
        """
        call = Call(_timeout_of(stream))
        self._calls.add(call)
        status = Status.CANCELLED
        try:
            if self._refusal is not None:
                raise self._refusal
            await call.run(method(stream))
        except Exception as error:
            status = await self._refuse(stream, error)
        else:
            status = Status.OK
            self._pace.end()
        finally:
            self._calls.discard(call)
            self._ended.set()
            self._by_status[status.name] += 1

    async def _refuse(self, stream: AnyStream, error: BaseException) -> Status:
        """Answers with the status of an error, and returns it.

        Only here the error has a name beside its handler's: a frame of its own traceback that named it would keep the
        request, a text of megabytes maybe, until the next collection of garbage.
        """
        cause = innermost(error)
        status = status_of(cause)
        self._tell(cause, status)
        await _refuse(stream, cause, status, self._pace.seconds_until_half_have_ended(len(self)))
        return status

    def _tell(self, error: BaseException, status: Status) -> None:
        labels = {"status": status.name, "kind": type(error).__name__}
        if is_unexpected(error):
            self._lines.write("error", "call failed", labels, exc_info=error)
        else:
            self._lines.write("info", "call refused", labels, error=message_of(error))


class GuardedService:
    """A service whose every method is run by `Calls.run`."""

    def __init__(self, service: IServable, calls: Calls, admission: Admission) -> None:
        self._service = service
        self._calls = calls
        self._admission = admission

    def __mapping__(self) -> dict[str, Handler]:
        return {path: self._guarded(path, handler) for path, handler in self._service.__mapping__().items()}

    def _guarded(self, path: str, handler: Handler) -> Handler:
        async def admitted(stream: AnyStream) -> None:
            with self._admission(stream):
                await handler.func(stream)

        async def call(stream: AnyStream) -> None:
            start = time.monotonic()
            with structlog.contextvars.bound_contextvars(method=path):
                try:
                    await self._calls.run(stream, admitted)
                finally:
                    log.debug("call ended", seconds=round(time.monotonic() - start, 6))

        return handler._replace(func=call)


def guarded(
    service: IServable, calls: Calls, admission: Admission = lambda stream: nullcontext()
) -> IServable:
    """The same service, its calls counted, bounded in time and answered in every case.

    Args:
        admission: a context of each call, which is not entered where the call may not be made.
    """
    return GuardedService(service, calls, admission)


def _timeout_of(stream: AnyStream) -> float | None:
    inner = stream._stream
    return inner.timeout_seconds if isinstance(inner, BoundedStream) else None


async def _refuse(stream: AnyStream, error: BaseException, status: Status, queue_seconds: float) -> None:
    """Ends the call with the status of `error`, if its client is still there."""
    try:
        await _send_status(stream, error, status, retry_seconds_of(error, queue_seconds))
    except StreamClosedError:
        log.debug("client gone")


async def _send_status(
    stream: AnyStream, error: BaseException, status: Status, retry_seconds: float | None
) -> None:
    has_begun = stream._send_initial_metadata_done
    metadata, details = error_metadata(error), None
    if retry_seconds is not None and not has_begun:  # what was begun cannot be begun again
        metadata |= retry_metadata(retry_seconds)
        details = retry_details(retry_seconds)
    await stream.send_trailing_metadata(
        status=status, status_message=message_of(error), status_details=details, metadata=metadata
    )
