"""A client that speaks HTTP/2 by hand, so that it can misbehave."""

import asyncio
import ssl
import struct

import h2.config
import h2.connection
import h2.events
import h2.settings

HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


def framed(message, *, is_compressed=False, length=None):
    """A message with its gRPC prefix; `length` lies about its size."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return struct.pack(">BI", is_compressed, len(data) if length is None else length) + data


class RawConnection:
    """One connection: what is sent goes out at `flush`, so that frames can arrive together."""

    def __init__(self, reader, writer, initial_window=None):
        self.reader, self.writer = reader, writer
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config=config)
        if initial_window is not None:
            self.h2.local_settings = h2.settings.Settings(
                client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: initial_window}
            )
        self.h2.initiate_connection()
        self.events = []
        self.statuses = {}
        self.trailers = {}
        self.data = {}

    @classmethod
    async def open(cls, address, initial_window=None):
        host, port = address.rsplit(":", 1)
        connection = cls(*await asyncio.open_connection(host, int(port)), initial_window)
        await connection.flush()
        await connection.wait_for(h2.events.RemoteSettingsChanged)
        return connection

    def request(self, path, data=b"", *, end_stream=True, timeout=None, more_headers=()):
        """Begins a call and returns its stream id."""
        stream_id = self.h2.get_next_available_stream_id()
        headers = [*HEADERS, (":path", path)] + ([("grpc-timeout", timeout)] if timeout else [])
        headers += more_headers
        self.h2.send_headers(stream_id, sorted(headers, key=lambda item: item[0][0] != ":"))
        if data or end_stream:
            self.h2.send_data(stream_id, data, end_stream=end_stream)
        return stream_id

    async def send(self, path, data, *, end_stream=True, more_headers=()):
        """Begins a call and sends all of `data`, however long."""
        stream_id = self.request(path, end_stream=False, more_headers=more_headers)
        while data:
            size = min(
                self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(data)
            )
            if size:
                self.h2.send_data(stream_id, data[:size], end_stream=end_stream and size == len(data))
                data = data[size:]
                await self.flush()
            else:
                await self._read()
        return stream_id

    async def flush(self):
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def wait_for(self, kind, stream_id=None):
        """Reads until there is an event of this kind, and returns it."""
        async with asyncio.timeout(20):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                        self.events.remove(event)
                        return event
                await self._read()

    async def answer(self):
        """Reads, and answers what is to be answered, until it is cancelled."""
        while True:
            await self._read()

    async def status(self, stream_id):
        """The grpc-status and the grpc-message with which the call ends."""
        async with asyncio.timeout(20):
            while stream_id not in self.statuses:
                await self._read()
        return self.statuses.pop(stream_id)

    async def begun(self, stream_id):
        """The status of a call that may never end: that of a success as soon as anything comes."""
        async with asyncio.timeout(20):
            while stream_id not in self.statuses and stream_id not in self.data:
                await self._read()
        return self.statuses.pop(stream_id, (0, ""))

    def data_of(self, stream_id):
        """All that was received on the stream."""
        return b"".join(self.data[stream_id])

    async def _read(self):
        data = await self.reader.read(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        for event in self.h2.receive_data(data):
            self._take(event)
        await self.flush()

    def _take(self, event):
        if isinstance(event, h2.events.DataReceived):
            self.data.setdefault(event.stream_id, []).append(event.data)
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            headers = dict(event.headers)
            if "grpc-status" in headers:
                self.trailers[event.stream_id] = headers
                self.statuses[event.stream_id] = int(headers["grpc-status"]), headers.get("grpc-message", "")
        else:
            self.events.append(event)

    async def close(self):
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):  # data of the server's crossed its end
            return

    def abort(self):
        """Resets the TCP connection."""
        self.writer.transport.abort()
