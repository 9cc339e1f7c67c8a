"""What a connection has received and not yet handled, given out in pieces that make little work each."""

__all__ = ["Backlog"]

PREFACE_BYTES = 24
HEADER_BYTES = 9
HEADERS = 0x1
PIECE_BYTES = 4096
PIECE_CALLS = 8


class Backlog:
    """The bytes in the order in which they came.

    A few bytes may begin a call, so that a piece is bounded in the calls that it can begin too.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._num_to_skip = PREFACE_BYTES  # until the next frame begins

    def __len__(self) -> int:
        return len(self._data)

    @property
    def has_piece(self) -> bool:
        """Whether there is more than the part of a frame's header."""
        return len(self._data) >= (1 if self._num_to_skip else HEADER_BYTES)

    def append(self, data: bytes) -> None:
        """Takes what came next."""
        self._data += data

    def clear(self) -> None:
        """Drops all of it."""
        self._data.clear()

    def take(self) -> bytes:
        """The next piece: at most PIECE_BYTES with the beginnings of at most PIECE_CALLS calls."""
        size = self._size_of_piece()
        piece = bytes(self._data[:size])
        del self._data[:size]
        return piece

    def _size_of_piece(self) -> int:
        data, place, num_headers = self._data, self._num_to_skip, 0
        most = min(len(data), PIECE_BYTES)
        while place + HEADER_BYTES <= most:
            num_headers += data[place + 3] == HEADERS
            if num_headers > PIECE_CALLS:
                break
            place += HEADER_BYTES + int.from_bytes(data[place : place + 3], "big")
        size = min(place, most)  # no header of a frame is cut
        self._num_to_skip = place - size
        return size
