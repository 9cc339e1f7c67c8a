"""What came on one stream and was not read yet."""

import asyncio
from collections.abc import Callable

__all__ = ["MessageBuffer"]


class MessageBuffer:
    """Takes the place of grpclib's buffer: it copies, so that many small frames cost no more than their bytes.

    What came counts against the connection's window until its stream asks for it, which then answers for it.

    Attributes:
        has_ended: whether nothing more comes.
        when_changed: is called after each frame and at the end; None = not now.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._num_unacked = 0
        self._changed: asyncio.Future[None] | None = None
        self.has_ended = False
        self.when_changed: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes, ack_size: int) -> None:
        """Takes the data of a frame, which has so many bytes of the windows."""
        self._data += data
        self._num_unacked += ack_size
        self._tell()

    def eof(self) -> None:
        """Nothing more comes."""
        self.has_ended = True
        self._tell()

    async def wait(self) -> None:
        """Returns when something came, or the end."""
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def take(self, size: int) -> bytes:
        """Removes the first `size` bytes, or as many as there are."""
        data = bytes(memoryview(self._data)[:size])
        if size >= len(self._data):
            self._data = bytearray()
        else:
            del self._data[:size]
        return data

    def unacked_size(self) -> int:
        """Of how much the connection's window was not told yet; from now on it is."""
        num_unacked, self._num_unacked = self._num_unacked, 0
        return num_unacked

    def _tell(self) -> None:
        if self.when_changed is not None:
            self.when_changed()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
