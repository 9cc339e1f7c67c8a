"""HTTP/2's state of one connection, with bounds on what a peer, or many calls, make it remember."""

from collections.abc import Callable, Iterable
from copy import copy

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, ConnectionInputs, H2Connection, _decode_headers
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, StreamReset
from h2.exceptions import (
    DenialOfServiceError,
    FlowControlError,
    ProtocolError,
    StreamClosedError,
    TooManyStreamsError,
)
from h2.settings import SettingCodes
from h2.stream import StreamClosedBy, StreamState
from hpack import Decoder, HeaderTuple, HPACKDecodingError, OversizedHeaderListError
from hpack.struct import Header
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from pykv.service.frame_buffer import MAX_BLOCK_BYTES, CheckedFrameBuffer

__all__ = ["BoundedH2Connection"]

MAX_HEADER_TABLE_BYTES = 4096
HEADER_BYTES = 9
ZERO_UPDATE = b"\0\0\4\x08"
MAX_TABLE_UPDATES = 2  # of a block, as HPACK has it
KNOWN_SETTINGS = frozenset(SettingCodes)


class BoundedDecoder(Decoder):
    """Reads blocks of headers whose fields are charged for: one byte may stand for a field.

    Args:
        charge: takes the number of fields of a block.
    """

    def __init__(self, charge: Callable[[int], None]) -> None:
        super().__init__(MAX_BLOCK_BYTES)
        self._charge = charge
        self._num_table_updates = 0

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """The fields of a block.

        Raises:
            OversizedHeaderListError: it has more than MAX_BLOCK_BYTES, as sent or with 32 bytes a field as read.
            HPACKDecodingError: it is malformed, or changes the table's size too often.
        """
        if len(data) > MAX_BLOCK_BYTES:
            raise OversizedHeaderListError(f"block of {len(data)} bytes: allowed is {MAX_BLOCK_BYTES}")
        self._num_table_updates = 0
        fields = list(super().decode(data, raw))
        self._charge(len(fields))
        return fields

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self._num_table_updates += 1
        if self._num_table_updates > MAX_TABLE_UPDATES:
            raise HPACKDecodingError(f"more than {MAX_TABLE_UPDATES} changes of the table's size in a block")
        return super()._update_encoding_context(data)


class CompressionError(ProtocolError):
    """A block of headers cannot be decoded, nor those that follow."""

    error_code = ErrorCodes.COMPRESSION_ERROR


class LenientFrameBuffer(CheckedFrameBuffer):
    """Gives out the frames that are an error of one stream only; h2 would end the connection."""

    def __next__(self) -> Frame:
        """The next frame; a WINDOW_UPDATE of a stream may be one of 0."""
        try:
            return super().__next__()
        except ProtocolError:
            stream_id = int.from_bytes(self._data[5:HEADER_BYTES], "big") & 0x7FFFFFFF
            if not (stream_id and self._data.startswith(ZERO_UPDATE) and not any(self._data[9:13])):
                raise
            del self._data[:13]
            frame = WindowUpdateFrame(stream_id, 0)
            self._update_header_buffer(frame)  # raises amid a block of headers
            return frame


class BoundedH2Connection(H2Connection):
    """h2's connection; beside its streams and windows it keeps some 100 KiB at most.

    An error that HTTP/2 calls one of a stream resets that stream only. One of the connection is for whoever feeds it
    to tell the peer.

    Headers come as Latin-1, which any byte is: what is no ASCII is for the call to answer, not for the connection.

    Args:
        charge_fields: takes the number of fields of each block of headers that is read.

    Attributes:
        MAX_CLOSED_STREAMS: streams whose ends are remembered, for the frames that were on their way meanwhile; data on
            one that was forgotten is answered by a reset.
    """

    MAX_CLOSED_STREAMS = 1024

    def __init__(
        self, config: H2Configuration, charge_fields: Callable[[int], None] = lambda num_fields: None
    ) -> None:
        config = copy(config)
        config.header_encoding = "latin-1"
        super().__init__(config)
        self.decoder = BoundedDecoder(charge_fields)
        self.incoming_buffer = LenientFrameBuffer(server=not config.client_side)
        self._count_at = 0

    def _terminate_connection(self, error_code: ErrorCodes) -> None:
        """Takes nothing more; h2 would say goodbye, without a word why."""
        self.state_machine.process_input(ConnectionInputs.SEND_GOAWAY)

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        """Begins a call, its answer, or the end of either; headers that are an error reset its stream only.

        They are decoded in any case: those that follow build on them.
        """
        headers = self._decode(frame.data)
        events = self.state_machine.process_input(ConnectionInputs.RECV_HEADERS)
        is_full = self._is_full(frame.stream_id)
        stream = self._get_or_create_stream(frame.stream_id, AllowedStreamIDs(not self.config.client_side))
        try:
            frames, more = stream.receive_headers(
                headers, "END_STREAM" in frame.flags, self.config.header_encoding
            )
            if "PRIORITY" in frame.flags:
                _check_priority(frame)
            if is_full:
                raise TooManyStreamsError(f"more than {self.local_settings.max_concurrent_streams} streams")
        except StreamClosedError:
            raise
        except TooManyStreamsError:
            return self._reset_alone(frame.stream_id, ErrorCodes.REFUSED_STREAM)
        except ProtocolError as error:
            return self._reset_alone(frame.stream_id, ErrorCodes(error.error_code))
        return frames, events + more

    def _decode(self, block: bytes) -> Iterable[Header]:
        try:
            return _decode_headers(self.decoder, block)
        except DenialOfServiceError:
            raise
        except ProtocolError as error:
            raise CompressionError(str(error)) from error

    def _receive_data_frame(self, frame: DataFrame) -> tuple[list[Frame], list[Event]]:
        """Takes data; what comes before headers, or is not as long as they announced, resets the stream only."""
        try:
            return super()._receive_data_frame(frame)
        except FlowControlError:
            raise
        except ProtocolError as error:
            if frame.stream_id not in self.streams:
                raise
            frames, events = self._reset_alone(frame.stream_id, ErrorCodes(error.error_code))
            increment = self._inbound_flow_control_window_manager.process_bytes(frame.flow_controlled_length)
            return frames + ([WindowUpdateFrame(0, increment)] if increment else []), events

    def _handle_data_on_closed_stream(
        self, events: list[Event], error: StreamClosedError, frame: DataFrame
    ) -> tuple[list[Frame], list[Event]]:
        """Gives the window back; a client, who has reset the call, ignores what was on its way.

        h2 would answer each frame by one more, and a server would take that for a flood.
        """
        frames, events = super()._handle_data_on_closed_stream(events, error, frame)
        if self.config.client_side:
            frames = [each for each in frames if not isinstance(each, RstStreamFrame)]
        return frames, events

    def _receive_window_update_frame(self, frame: WindowUpdateFrame) -> tuple[list[Frame], list[Event]]:
        """Opens a window; one of 0 resets its stream only."""
        if frame.window_increment:
            return super()._receive_window_update_frame(frame)
        return self._reset_alone(frame.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def _receive_priority_frame(self, frame: HeadersFrame | PriorityFrame) -> tuple[list[Frame], list[Event]]:
        """Ignores it, but for a stream that depends on itself, which is reset."""
        try:
            _check_priority(frame)
        except ProtocolError:
            return self._reset_alone(frame.stream_id, ErrorCodes.PROTOCOL_ERROR)
        return [], self.state_machine.process_input(ConnectionInputs.RECV_PRIORITY)

    def _is_full(self, stream_id: int) -> bool:
        """Whether the stream would be one too many; h2 would count all of them for each that begins.

        To count them forgets those that are closed.
        """
        if stream_id in self.streams or len(self.streams) < self._count_at:
            return False
        most, num_open = self.local_settings.max_concurrent_streams, self.open_inbound_streams
        self._count_at = min(2 * num_open, most)
        return num_open >= most

    def _reset_alone(self, stream_id: int, code: ErrorCodes) -> tuple[list[Frame], list[Event]]:
        """Ends one stream, whatever state it is in; one that is not open stays as it is."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return [], []
        stream.state_machine.state = StreamState.CLOSED
        stream.state_machine.stream_closed_by = StreamClosedBy.SEND_RST_STREAM
        event = StreamReset(stream_id=stream_id, error_code=code, remote_reset=False)
        return [RstStreamFrame(stream_id, int(code))], [event]

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        """Leaves the connection open at a goodbye without an error, for the calls that have begun.

        h2 would take it for closed, and drop what waits to be sent.
        """
        if frame.error_code != ErrorCodes.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        event = ConnectionTerminated()
        event.error_code = ErrorCodes.NO_ERROR
        event.last_stream_id = frame.last_stream_id
        return [], [event]

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        """Ignores what is unknown, as HTTP/2 demands, and takes no larger table for headers than the default.

        h2 would keep each of the 65 536 settings that a peer may name, and index every header that is sent.
        """
        settings = {code: value for code, value in frame.settings.items() if code in KNOWN_SETTINGS}
        if SettingCodes.HEADER_TABLE_SIZE in settings:
            wanted = settings[SettingCodes.HEADER_TABLE_SIZE]
            settings[SettingCodes.HEADER_TABLE_SIZE] = min(wanted, MAX_HEADER_TABLE_BYTES)
        frame.settings = settings
        received = super()._receive_settings_frame(frame)
        self._merge_table_sizes()
        return received

    def _merge_table_sizes(self) -> None:
        """Of the sizes that the next headers must tell, the least and the last are enough."""
        sizes = self.encoder.table_size_changes
        if len(sizes) > 2:
            sizes[:] = [min(sizes), sizes[-1]]


def _check_priority(frame: HeadersFrame | PriorityFrame) -> None:
    if frame.depends_on == frame.stream_id:
        raise ProtocolError(f"stream {frame.stream_id} depends on itself")
