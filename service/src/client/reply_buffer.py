"""What came on one call and was not read yet."""

import asyncio

__all__ = ["ReplyBuffer"]


class ReplyBuffer:
    """Takes the place of grpclib's buffer: it copies, so that many small frames cost no more than their bytes.

    Attributes:
        has_ended: whether nothing more comes.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._num_unacked = 0
        self._changed = asyncio.Event()
        self.has_ended = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes, ack_size: int) -> None:
        """Takes the data of a frame, which has so many bytes of the call's window."""
        self._data += data
        self._num_unacked += ack_size
        self._changed.set()

    def eof(self) -> None:
        """Nothing more comes."""
        self.has_ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Returns when something came, or the end."""
        self._changed.clear()
        await self._changed.wait()

    def take(self, size: int) -> bytes:
        """Removes the first `size` bytes, or as many as there are."""
        data = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return data

    def due(self, num_kept: int) -> int:
        """Of how many bytes the call's window may be told, where so many are kept back."""
        return max(0, self._num_unacked - num_kept)

    def told(self, num_bytes: int) -> None:
        """The window was told of so many."""
        self._num_unacked -= num_bytes

    def unacked_size(self) -> int:
        """Nothing: the connection's window is told of all data as it comes."""
        return 0
