"""The window of a whole HTTP/2 connection, which is opened again in few steps."""

from grpclib.config import Configuration
from grpclib.protocol import Connection
from h2.connection import ConnectionState, H2Connection

__all__ = ["WindowedConnection"]


class WindowedConnection(Connection):
    """A connection that gives its own window back; each stream gives back its own.

    Attributes:
        h2: HTTP/2's state.
    """

    def __init__(self, h2: H2Connection, transport: object, config: Configuration) -> None:
        super().__init__(h2, transport, config=config)  # type: ignore[arg-type]
        self.h2 = h2
        self._num_to_give_back = 0

    def ack(self, stream_id: int, size: int) -> None:
        """Opens the connection's window again for as many bytes as were taken of a stream."""
        self._num_to_give_back += size
        is_much = self._num_to_give_back >= self._config.http2_connection_window_size // 4
        if is_much and self.h2.state_machine.state is not ConnectionState.CLOSED:
            self.h2.increment_flow_control_window(self._num_to_give_back)
            self._num_to_give_back = 0
            self.flush()
