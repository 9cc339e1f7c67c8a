"""What one connection's frames do to its calls."""

from typing import cast

from grpclib.client import Handler
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.protocol import AbstractHandler, Connection, EventsProcessor
from grpclib.utils import Wrapper
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
)

from pykv.service.client.failures import ServiceError
from pykv.service.client.reply_headers import Headers, read_headers, status_problem
from pykv.service.client.reply_stream import ReplyStream
from pykv.service.client.tls_failures import Reason
from pykv.service.connection_window import WindowedConnection
from pykv.service.files import shown

__all__ = ["ReplyConnection", "ReplyEvents"]

TOO_MANY_PINGS = b"too_many_pings"  # gRPC's word for it in a goodbye
ASKED_TOO_OFTEN = (
    "the server closed the connection: too_many_pings; a larger keepalive_seconds asks less often"
)
SAID_BYTES = 120
HTTP_OK = "200"
NOT_BEGUN = "the server is shutting down and did not begin the call"
MAX_UNSENT_BYTES = 2**20


class ReplyConnection(WindowedConnection):
    """A connection whose streams are bounded.

    Its own window is told of all data as it comes: the streams' windows bound what waits to be read, and a call that is
    not read holds up no other.

    Args:
        max_message_bytes: size of a received message.
    """

    def __init__(
        self, h2: H2Connection, transport: object, config: Configuration, max_message_bytes: int
    ) -> None:
        super().__init__(h2, transport, config)
        self._max_message_bytes = max_message_bytes
        self._num_unsent = 0

    @property
    def is_not_read(self) -> bool:
        """Whether so many answers wait for a server that reads none that it must be left."""
        return self._num_unsent > MAX_UNSENT_BYTES

    def flush(self) -> None:
        """Sends what the protocol demands: answers to PINGs and settings, windows, and the ends of calls."""
        data = self.h2.data_to_send()
        if data and not self.is_closing():
            self._num_unsent = 0 if self.write_ready.is_set() else self._num_unsent + len(data)
            self._transport.write(data)

    def create_stream(self, *, stream_id: int | None = None, wrapper: Wrapper | None = None) -> ReplyStream:
        """The stream of a call that is about to begin."""
        if stream_id is not None:
            raise ValueError(f"stream_id is {stream_id}: allowed is None, since the server begins no streams")
        return ReplyStream(self, self.h2, self._max_message_bytes, wrapper)


class ReplyEvents(EventsProcessor):
    """Hands HTTP/2 events to the calls.

    Attributes:
        waiting: those that wait until the server lets one more begin.
    """

    def __init__(self, handler: AbstractHandler, connection: Connection) -> None:
        super().__init__(handler, connection)
        self.waiting: set[ReplyStream] = set()

    def end(self, reason: Reason) -> None:
        """As `close`, and the calls learn what of TLS may be the matter."""
        for stream in [*self.streams.values(), *self.waiting]:
            cast(ReplyStream, stream).terminate(reason)
        self.close(reason.text)

    def close(self, reason: str = "Connection closed") -> None:
        """Ends the connection and all calls, those too that have not begun."""
        super().close(reason)
        self._end_waiting(reason)

    def process(self, event: Event) -> None:
        """Ignores what says nothing to a call, such as frames of extensions, where grpclib would fail."""
        if type(event) in getattr(self, "processors", ()):  # grpclib deletes them at the end
            super().process(event)

    def process_remote_settings_changed(self, event: RemoteSettingsChanged) -> None:
        """More calls may begin, or send more."""
        super().process_remote_settings_changed(event)
        self.connection.stream_close_waiter.set()

    def process_request_received(self, event: RequestReceived) -> None:
        """A server begins no calls."""
        self.close(f"the server broke HTTP/2: it began the stream {event.stream_id}")

    def process_response_received(self, event: ResponseReceived) -> None:
        """Headers that have no HTTP status end their call."""
        headers = cast(Headers, event.headers)  # as the connection decodes them
        statuses = [value for name, value in headers if name == ":status"]
        stream = self._call(event.stream_id)
        if stream is None:
            return
        if len(statuses) == 1 and len(statuses[0]) == 3 and statuses[0].isdecimal():
            is_end = event.stream_ended is not None
            stream.headers = read_headers(headers, is_end=is_end)
            stream.headers_received.set()
            if is_end and statuses == [HTTP_OK]:
                _check_status(stream, stream.headers)
        else:
            found = shown(", ".join(statuses)) if statuses else "missing"
            problem = f"the server sent headers whose :status is {found}"
            stream.fail(ServiceError(problem, Status.INTERNAL.name))

    def process_trailers_received(self, event: TrailersReceived) -> None:
        """Keeps what is read of trailers, which end the answer."""
        stream = self._call(event.stream_id)
        if stream is not None:
            stream.trailers = read_headers(cast(Headers, event.headers), is_end=True)
            stream.trailers_received.set()
            _check_status(stream, stream.trailers)

    def process_data_received(self, event: DataReceived) -> None:
        """The connection may go on, whether the call reads it or not."""
        super().process_data_received(event)
        if event.stream_id in self.streams:  # else grpclib has told already
            self.connection.ack(event.stream_id, event.flow_controlled_length)

    def process_stream_reset(self, event: StreamReset) -> None:
        """Says by which code the server ended a call, or that HTTP/2 forbids what it sent."""
        stream = self._call(event.stream_id)
        if stream is not None:
            name = _name_of(event.error_code)
            if event.remote_reset:
                stream.__terminated__(f"the server reset the call: {name}")
            else:
                stream.fail(ServiceError(f"the answer is not as HTTP/2 has it: {name}", Status.INTERNAL.name))
        super().process_stream_reset(event)

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """After a goodbye the calls that the server began go on, the next begins on a new connection."""
        code, last_stream_id = cast(int, event.error_code), cast(int, event.last_stream_id)
        if code == ErrorCodes.NO_ERROR:
            cast(Handler, self.handler).connection_lost = True  # for the channel's next call, that is
            for stream_id, stream in list(self.streams.items()):
                if stream_id > last_stream_id:
                    stream.__terminated__(NOT_BEGUN)
            self._end_waiting(NOT_BEGUN)
        elif event.additional_data == TOO_MANY_PINGS:
            self.close(ASKED_TOO_OFTEN)
        else:
            said = f", {event.additional_data[:SAID_BYTES]!r}" if event.additional_data else ""
            self.close(f"the server closed the connection: {_name_of(code)}{said}")

    def _end_waiting(self, reason: str) -> None:
        for stream in list(self.waiting):
            stream.__terminated__(reason)

    def _call(self, stream_id: int) -> ReplyStream | None:
        """The stream of a call; None where the call has ended."""
        return cast(ReplyStream | None, self.streams.get(stream_id))


def _check_status(stream: ReplyStream, headers: Headers) -> None:
    problem = status_problem(headers)
    if problem is not None:
        stream.fail(ServiceError(problem, Status.UNKNOWN.name))


def _name_of(code: int) -> str:
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"error code {code}"
