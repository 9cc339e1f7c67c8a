"""Looks at the header of each HTTP/2 frame as it comes: what may not be is refused before it is buffered."""

from h2.exceptions import DenialOfServiceError, FrameTooLargeError, ProtocolError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import Frame

__all__ = ["MAX_BLOCK_BYTES", "CheckedFrameBuffer"]

HEADER_BYTES = 9
SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x4, 0x7, 0x8, 0x9
ACK = 0x1
MAX_BLOCK_BYTES = 64 * 1024
"""Of a block of headers, as it was sent."""


class CheckedFrameBuffer(FrameBuffer):
    """Gives out the frames of one connection; beside what it was just given it keeps less than one frame and one block.

    h2's own looks at a frame's length once all of it is there, which is up to 16 MiB, and at a block's at its end.
    """

    def __init__(self, server: bool = False) -> None:
        super().__init__(server)
        self._has_begun = False

    def __next__(self) -> Frame:
        """The next frame.

        Raises:
            FrameTooLargeError: its header announces more than it may have.
            DenialOfServiceError: the block of headers that it goes on with is too long.
            ProtocolError: it is not what may come here.
            StopIteration: not all of it has come.
        """
        if len(self._data) >= HEADER_BYTES:
            self._check_header()
            self._clear_reserved_bit()
        return super().__next__()

    def _check_header(self) -> None:
        length, kind = int.from_bytes(self._data[:3], "big"), self._data[3]
        is_ack = kind == SETTINGS and bool(self._data[4] & ACK)
        if not self._has_begun:
            if kind != SETTINGS or is_ack:
                raise ProtocolError("the first frame is not SETTINGS")
            self._has_begun = True
        self._validate_frame_length(length)
        if is_ack and length:
            raise FrameTooLargeError(f"SETTINGS that acknowledge have {length} bytes: allowed is none")
        if kind == CONTINUATION:
            num_bytes = length + sum(len(frame.data) for frame in self._headers_buffer)
            if num_bytes > MAX_BLOCK_BYTES:
                raise DenialOfServiceError(f"block of {num_bytes} bytes: allowed is {MAX_BLOCK_BYTES}")

    def _clear_reserved_bit(self) -> None:
        """Of the number with which these frames begin; HTTP/2 has it ignored, h2 reads it as a part of the number."""
        if self._data[3] in (GOAWAY, WINDOW_UPDATE) and len(self._data) > HEADER_BYTES:
            self._data[HEADER_BYTES] &= 0x7F
