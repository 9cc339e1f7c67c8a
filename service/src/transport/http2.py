"""HTTP/2's state of one connection, with bounds on what a peer, or many calls, make it remember."""

from collections.abc import Callable, Iterable
from copy import copy

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.settings import SettingCodes
from hpack import Decoder, HeaderTuple, HPACKDecodingError, OversizedHeaderListError
from hyperframe.frame import Frame, GoAwayFrame, SettingsFrame

__all__ = ["BoundedH2Connection"]

MAX_HEADER_TABLE_BYTES = 4096
MAX_BLOCK_BYTES = 64 * 1024
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
            raise OversizedHeaderListError(f"block of {len(data)} bytes; allowed: {MAX_BLOCK_BYTES}")
        self._num_table_updates = 0
        fields = list(super().decode(data, raw))
        self._charge(len(fields))
        return fields

    def _update_encoding_context(self, data: bytes | memoryview) -> int:
        self._num_table_updates += 1
        if self._num_table_updates > MAX_TABLE_UPDATES:
            raise HPACKDecodingError(f"more than {MAX_TABLE_UPDATES} changes of the table's size in a block")
        return super()._update_encoding_context(data)


class BoundedH2Connection(H2Connection):
    """h2's connection; beside its streams and windows it keeps some 100 KiB at most.

    Headers come as Latin-1, which any byte is: what is no ASCII is for the call to answer, not for the connection.

    Args:
        charge_fields: takes the number of fields of each block of headers that is read.

    Attributes:
        MAX_CLOSED_STREAMS: streams whose ends are remembered, for the frames that were on their way meanwhile; data on
            one that was forgotten is answered by a reset.
    """

    MAX_CLOSED_STREAMS = 1024

    def __init__(self, config: H2Configuration, charge_fields: Callable[[int], None]) -> None:
        config = copy(config)
        config.header_encoding = "latin-1"
        super().__init__(config)
        self.decoder = BoundedDecoder(charge_fields)

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
