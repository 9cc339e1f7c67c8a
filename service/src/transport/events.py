"""What one connection's frames do: calls begin, are refused, and end."""

from collections.abc import Callable
from typing import cast

from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.metadata import encode_bin_value, encode_grpc_message
from grpclib.protocol import EventsProcessor, Stream
from grpclib.utils import Wrapper
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)

from pykv.service.bounded_log import BoundedLog
from pykv.service.connection_window import WindowedConnection
from pykv.service.status import retry_details, retry_metadata
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.goaway import goaway
from pykv.service.transport.handler import CallHandler
from pykv.service.transport.headers import HeaderFault, fault_of, is_malformed, size_of
from pykv.service.transport.incoming import Incoming
from pykv.service.transport.limits import TransportLimits
from pykv.service.transport.offence import Offence
from pykv.service.transport.ping_strikes import PingStrikes
from pykv.service.transport.refusals import Refusals
from pykv.service.transport.stream import BoundedStream
from pykv.service.transport.writer import TickWriter

__all__ = ["LARGEST_STREAM_ID", "BoundedConnection", "CallEvents"]

LARGEST_STREAM_ID = 2**31 - 1
PING_DATA = b"pykv-srv"
NO_ROOM = "no room for the call beside those that have not ended; try again later"
RETRY_SECONDS = 1.0

Headers = list[tuple[str, str]]


class BoundedConnection(WindowedConnection):
    """A connection whose streams are bounded.

    Attributes:
        whole: the streams that have ended on the client's side by what was fed last.
    """

    def __init__(
        self,
        h2: H2Connection,
        writer: TickWriter,
        config: Configuration,
        limits: TransportLimits,
        meter: FrameMeter,
        incoming: Incoming,
    ) -> None:
        super().__init__(h2, writer.as_transport(), config)
        self._writer = writer
        self._limits = limits
        self.meter = meter
        self.pings = PingStrikes(limits)
        self.refusals = Refusals(limits)
        self.incoming = incoming
        self.sharer = incoming.sharer
        self.stream_window = config.http2_stream_window_size
        self.whole: set[int] = set()

    @property
    def offence(self) -> Offence | None:
        """Why the peer must be sent away; None where there is no reason to."""
        if self.meter.is_overdrawn:
            return Offence.CONTROL_FRAMES
        if self.refusals.are_too_many:
            return Offence.REFUSED_CALLS
        if self.incoming.are_too_slow:
            return Offence.SLOW_REQUESTS
        return Offence.PINGS if self.pings.are_too_many else None

    def headers_send_process(self) -> None:
        """Told by grpclib: headers were sent."""
        super().headers_send_process()
        self.pings.forgive()

    def data_send_process(self) -> None:
        """Told by grpclib: data was sent."""
        super().data_send_process()
        self.pings.forgive()

    def ping(self) -> None:
        """Asks the peer for an answer."""
        if not self.is_closing():
            self.h2.ping(PING_DATA)
            self.flush()

    def feed(self, data: bytes) -> list[Event]:
        """What `data` says, without that for which nothing needs to be done.

        That is the calls that it both begins and resets, and all but the last update of the connection's window, of
        each of which every stream would be told.
        """
        events = super().feed(data)
        resets = [event for event in events if isinstance(event, StreamReset)]
        if resets:
            self.meter.charge(sum(not event.remote_reset for event in resets))  # h2 did, because of an error
        gone = {event.stream_id for event in resets}
        needless = {
            id(event) for event in events if isinstance(event, RequestReceived) and event.stream_id in gone
        }
        updates = [event for event in events if isinstance(event, WindowUpdated) and event.stream_id == 0]
        needless.update(map(id, updates[:-1]))
        self.whole = {event.stream_id for event in events if isinstance(event, StreamEnded)}
        return [event for event in events if id(event) not in needless] if needless else events

    def say_goodbye(
        self, last_stream_id: int, error_code: ErrorCodes = ErrorCodes.NO_ERROR, reason: str = ""
    ) -> None:
        """Tells the peer that of the calls that it begins those after `last_stream_id` are not served."""
        self._writer.write(goaway(last_stream_id, error_code, reason))

    def create_stream(self, *, stream_id: int | None = None, wrapper: Wrapper | None = None) -> BoundedStream:
        """The stream of a call that a client began."""
        if stream_id is None:
            raise ValueError("stream_id is None: allowed is the id that the client chose")
        return BoundedStream(self, self.h2, self._writer, self._limits, stream_id, self.incoming)


class CallEvents(EventsProcessor):
    """Hands HTTP/2 events to the calls, and refuses calls that begin after the last one that is served.

    Args:
        lines: where it is told what went wrong in here.
    """

    last_stream_id = LARGEST_STREAM_ID
    connection: BoundedConnection
    handler: CallHandler
    _is_leaving = False

    def __init__(self, handler: CallHandler, connection: BoundedConnection, lines: BoundedLog) -> None:
        super().__init__(handler, connection)
        self._lines = lines

    @property
    def last_begun(self) -> int:
        """The id of the last call that was, or is, served."""
        return min(self.connection.h2.highest_inbound_stream_id, self.last_stream_id)

    def process(self, event: Event) -> None:
        """Handles what is known; frames of extensions are ignored, as HTTP/2 demands.

        What goes wrong with one stream ends that stream only.
        """
        processors = getattr(self, "processors", {})  # gone once the connection is closed
        if type(event) not in processors:
            return
        stream_id = getattr(event, "stream_id", None)
        if not stream_id:
            processors[type(event)](event)
            return
        try:
            processors[type(event)](event)
        except Exception as error:
            self._lines.write("error", "stream failed", {"kind": type(error).__name__}, exc_info=error)
            self._end_stream(stream_id, ErrorCodes.INTERNAL_ERROR)

    def process_request_received(self, event: RequestReceived) -> None:
        """Begins a call, or lets the client know that it may try elsewhere, or what is wrong with its headers."""
        assert event.stream_id is not None  # h2 sets it
        if event.stream_id > self.last_stream_id:
            self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        headers = cast(Headers, event.headers)  # h2 decodes them
        fault = fault_of(headers, self.handler.mapping, has_ended=event.stream_ended is not None)
        fault = fault or self._fault_of_memory(event.stream_id, headers)
        if fault is None:
            self.create_call(event)
        else:
            self._refuse(event.stream_id, fault)

    def _fault_of_memory(self, stream_id: int, headers: Headers) -> HeaderFault | None:
        """Takes the memory of a call that may begin; one whose request is there at once needs none for waiting."""
        path = dict(headers)[":path"]
        if stream_id in self.connection.whole and self.handler.limits_of(path).is_queued:
            return None
        num_bytes = size_of(headers)
        if self.handler.has_many_messages(path):
            num_bytes += self.connection.stream_window  # of messages that nobody reads yet
        if self.connection.incoming.begin(stream_id, num_bytes):
            return None
        return HeaderFault("no room", Status.RESOURCE_EXHAUSTED, NO_ROOM, retry_seconds=RETRY_SECONDS)

    def create_call(self, event: RequestReceived) -> None:
        """Begins the task of a call whose headers are as they must be."""
        super().process_request_received(event)

    def process_trailers_received(self, event: TrailersReceived) -> None:
        """Ignores what they say, but for such as HTTP/2 forbids."""
        assert event.stream_id is not None  # h2 sets it
        if is_malformed(cast(Headers, event.headers)):
            self._end_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def process_data_received(self, event: DataReceived) -> None:
        """Buffers data; an empty frame is no end of the stream."""
        if event.flow_controlled_length:
            super().process_data_received(event)

    def process_ping_received(self, event: PingReceived) -> None:
        """Counts it; h2 has answered."""
        self.connection.pings.count(has_calls=bool(self.streams))

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        """Ends the connection: at once because of an error, else with the last of its calls."""
        if event.error_code == ErrorCodes.NO_ERROR:
            self.close_when_done()
        else:
            super().process_connection_terminated(event)

    def register(self, stream: Stream) -> Callable[[], None]:
        """Knows a call until it is released by what is returned."""
        release = super().register(stream)

        def release_stream() -> None:
            release()
            self.connection.incoming.end(cast(int, stream.id))  # set when the stream was made
            self._close_if_done()

        return release_stream

    def close_when_done(self) -> None:
        """Closes the connection once no call is left: one side has said goodbye."""
        self._is_leaving = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_leaving and not self.streams and not self.connection.is_closing():
            self.connection.flush()
            self.connection.say_goodbye(self.last_begun)
            self.close("a goodbye was said")

    def _refuse(self, stream_id: int, fault: HeaderFault) -> None:
        """Answers without a task: such calls may come in floods."""
        self._lines.write("debug", "call refused", {"reason": fault.kind}, error=fault.message)
        if fault.retry_seconds is None:  # else it is the daemon that has no room
            self.connection.refusals.count()
        if fault.status is None:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        if self._can_answer(stream_id):
            headers = [
                (":status", fault.http_status),
                ("content-type", "application/grpc"),
                ("grpc-status", str(fault.status.value)),
                ("grpc-message", encode_grpc_message(fault.message)),
                *self._retry_headers(fault),
            ]
            self.connection.h2.send_headers(stream_id, headers, end_stream=True)
        self._reset(stream_id, ErrorCodes.NO_ERROR)  # the rest of a request that has not ended

    def _retry_headers(self, fault: HeaderFault) -> Headers:
        """When the call may be tried again, for clients that read details of a status and for those that do not."""
        codec = self.handler.status_details_codec
        if fault.status is None or fault.retry_seconds is None or codec is None:
            return []
        details = codec.encode(fault.status, fault.message, retry_details(fault.retry_seconds))
        encoded = encode_bin_value(details).decode("ascii")
        return [*retry_metadata(fault.retry_seconds).items(), ("grpc-status-details-bin", encoded)]

    def _end_stream(self, stream_id: int, code: ErrorCodes) -> None:
        """Resets a stream, and ends its call if it has begun."""
        self._reset(stream_id, code)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.connection.incoming.end(stream_id)
            return
        stream.__terminated__("the stream was reset")
        if not self.handler.cancel(stream):
            del self.streams[stream_id]

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        if self._can_answer(stream_id):
            self.connection.h2.reset_stream(stream_id, code)

    def _can_answer(self, stream_id: int) -> bool:
        """Whether neither a later frame that came with the headers nor an answer has closed the stream."""
        h2 = self.connection.h2
        stream = h2.streams.get(stream_id)
        return (
            h2.state_machine.state is not ConnectionState.CLOSED and stream is not None and not stream.closed
        )
