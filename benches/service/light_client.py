"""A client that costs next to nothing, so that the server is what is measured: it counts frames and decodes none."""

from __future__ import annotations

import asyncio
import time

import h2.config
import h2.connection
import h2.settings

from pykv.service.protocol import engine_pb2 as pb

WIDE = 2**31 - 1
DATA, HEADERS, PING = 0, 1, 6  # kinds of frames
ACK, END_STREAM = 1, 1  # flags
FRAME_HEADER_BYTES = 9
MESSAGE_PREFIX_BYTES = 5


class LightConnection(asyncio.Protocol):
    """One connection with some streams that are read and never acknowledged: the windows are as wide as they go.

    Attributes:
        num_messages: DATA frames that came; the server sends one for each message.
        begun: the ids of the streams that have got one.
        num_ended: streams that have ended.
        last: the last of these messages, with its prefix.
        delays: seconds from a token's making to its arrival, if wanted.
    """

    def __init__(self, wants_delays: bool = False) -> None:
        self.num_messages = 0
        self.num_ended = 0
        self.begun: set[bytes] = set()
        self.delays: list[float] | None = [] if wants_delays else None
        self.last = b""
        self._rest = b""
        config = h2.config.H2Configuration(client_side=True)
        self._h2 = h2.connection.H2Connection(config=config)
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WIDE}
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WIDE - 65_535)

    @classmethod
    async def open(cls, address: str, wants_delays: bool = False) -> LightConnection:
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(wants_delays), host, int(port))
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self._h2.data_to_send())

    def request(self, request: pb.GenerateRequest) -> None:
        """Begins a stream."""
        message = request.SerializeToString()
        stream_id = self._h2.get_next_available_stream_id()
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", "/pykv.v1.Engine/Generate")),
            *((":authority", "bench"), ("te", "trailers"), ("content-type", "application/grpc")),
        ]
        self._h2.send_headers(stream_id, headers)
        self._h2.send_data(stream_id, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        self.transport.write(self._h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data, place = self._rest + data, 0
        while place + FRAME_HEADER_BYTES <= len(data):
            end = place + FRAME_HEADER_BYTES + int.from_bytes(data[place : place + 3], "big")
            if end > len(data):
                break
            self._frame(data[place : place + FRAME_HEADER_BYTES], data[place + FRAME_HEADER_BYTES : end], now)
            place = end
        self._rest = data[place:]

    def tokens_of_last(self) -> int:
        """How many tokens the last message holds; it must be a whole one."""
        message, length = self.last[MESSAGE_PREFIX_BYTES:], int.from_bytes(self.last[1:MESSAGE_PREFIX_BYTES])
        assert len(message) == length
        return len(pb.GenerateResponse.FromString(message).deltas[0].token_ids)

    def _frame(self, header: bytes, payload: bytes, now: float) -> None:
        if header[3] == DATA and payload:
            self.num_messages += 1
            self.last = payload
            self.begun.add(header[5:])
            if self.delays is not None:
                made_at = pb.GenerateResponse.FromString(payload[MESSAGE_PREFIX_BYTES:]).deltas[0].text
                self.delays.append(now - float(made_at))
        elif header[3] == HEADERS and header[4] & END_STREAM:
            self.num_ended += 1
        elif header[3] == PING and not header[4] & ACK:
            self.transport.write(header[:4] + bytes([ACK]) + header[5:] + payload)
