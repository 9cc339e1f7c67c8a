"""Counts the frames by which a peer makes much work of few bytes, against an allowance that fills with time."""

import time
from collections.abc import Callable

from pykv.service.transport.allowance import Allowance
from pykv.service.transport.limits import TransportLimits

__all__ = ["FrameMeter"]

PREFACE_BYTES = 24
HEADER_BYTES = 9
DATA, HEADERS, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x4, 0x8, 0x9
END_STREAM, END_HEADERS, PADDED = 0x1, 0x4, 0x8
SMALL_DATA_BYTES = 256
SMALL_COST = 0.1
STREAMS_A_FRAME = 256
FREE_BLOCK_BYTES = 1024
BLOCK_BYTES_A_FRAME = 1024
FREE_FIELDS = 32
FIELD_COST = 0.1
SETTING_BYTES = 6
SETTING_COST = 0.01
FREE_SETTINGS = 16


class FrameMeter:
    """Reads the headers of a connection's frames, before HTTP/2 is parsed: that is what such frames would cost.

    A reset, SETTINGS, PING, PRIORITY, CONTINUATION, an unknown frame, and DATA that is empty and ends nothing cost
    1 each; a tenth costs WINDOW_UPDATE, since peers that read send many, and DATA of less than 256 bytes that ends
    nothing, since short messages are sent so; padding is no data. SETTINGS, of which each stream is told, cost 1 more
    for STREAMS_A_FRAME of those, and SETTING_COST for each setting beyond FREE_SETTINGS. HEADERS and CONTINUATION cost
    1 more for BLOCK_BYTES_A_FRAME that they have beyond FREE_BLOCK_BYTES, and a block FIELD_COST for each field beyond
    FREE_FIELDS. The rest is free: streams, windows, and turns of the loop bound it.

    Attributes:
        num_begun: frames that have begun, other than CONTINUATION.
    """

    def __init__(self, limits: TransportLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowance = Allowance(limits, clock)
        self._num_to_skip = PREFACE_BYTES
        self._cut_header = b""
        self._awaits_continuation = False
        self.num_begun = 0

    @property
    def is_amid(self) -> bool:
        """Whether the peer owes its first frame, or the rest of a frame or of a block of headers."""
        is_cut = bool(self._cut_header) or self._num_to_skip > 0
        return is_cut or self._awaits_continuation or not self.num_begun

    @property
    def is_overdrawn(self) -> bool:
        """Whether more was charged than the peer may use."""
        return self._allowance.is_overdrawn

    def read(self, data: bytes, num_streams: int = 0) -> None:
        """Charges for the frames that begin in `data`, which follows what was read before.

        Args:
            num_streams: of the connection.
        """
        data = self._cut_header + data
        place, cost = self._num_to_skip, 0.0
        while place + HEADER_BYTES <= len(data):
            size = int.from_bytes(data[place : place + 3], "big")
            kind, flags = data[place + 3], data[place + 4]
            num_padding = 0
            if kind == DATA and flags & PADDED and size:
                if place + HEADER_BYTES == len(data):
                    break  # how much of it is padding is not known yet
                num_padding = 1 + data[place + HEADER_BYTES]
            cost += _cost(kind, flags, max(size - num_padding, 0), num_streams)
            self._begin(kind, flags)
            place += HEADER_BYTES + size
        self._cut_header = data[place:]
        self._num_to_skip = max(place - len(data), 0)
        if cost:
            self.charge(cost)

    def charge_fields(self, num_fields: int) -> None:
        """Takes what the fields of one block of headers cost."""
        if num_fields > FREE_FIELDS:
            self.charge((num_fields - FREE_FIELDS) * FIELD_COST)

    def _begin(self, kind: int, flags: int) -> None:
        self.num_begun += kind != CONTINUATION
        if kind in (HEADERS, CONTINUATION):
            self._awaits_continuation = not flags & END_HEADERS

    def charge(self, cost: float) -> None:
        """Takes from the allowance."""
        self._allowance.charge(cost)


def _cost(kind: int, flags: int, size: int, num_streams: int) -> float:
    if kind == DATA:
        if flags & END_STREAM or size >= SMALL_DATA_BYTES:
            return 0.0
        return SMALL_COST if size else 1.0
    if kind == WINDOW_UPDATE:
        return SMALL_COST
    if kind == SETTINGS:
        num_settings = size // SETTING_BYTES
        return 1.0 + num_streams // STREAMS_A_FRAME + max(num_settings - FREE_SETTINGS, 0) * SETTING_COST
    if kind in (HEADERS, CONTINUATION):
        return (kind == CONTINUATION) + max(size - FREE_BLOCK_BYTES, 0) / BLOCK_BYTES_A_FRAME
    return 1.0
