"""A server that speaks HTTP/2 by hand and answers each method as a test has it."""

import asyncio
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events

GENERATE, MODEL, EVENTS = (
    f"/pykv.v1.Engine/{name}" for name in ("Generate", "GetModel", "SubscribeKvEvents")
)
BEGIN = [(":status", "200"), ("content-type", "application/grpc")]
END = [("grpc-status", "0")]
EMPTY = b"\0\0\0\0\0"  # a message without a field


def well(connection, stream_id):
    """Answers as a server should, with one message."""
    connection.send_headers(stream_id, BEGIN)
    connection.send_data(stream_id, EMPTY)
    connection.send_headers(stream_id, END, end_stream=True)


class ScriptedServer:
    """Takes calls by hand.

    Args:
        answers: by the path of a method, what answers a call of it: it is given h2's connection and the stream's id,
            and may return bytes that are sent after what h2 has; methods that are not here are answered well.

    Attributes:
        at_headers: the same as `answers`, for calls that are answered before their request has come whole.
        is_silent: whether it sends only what the test has it say: no answer to a PING.
        num_connections, num_pings: that came.
        calls: of each path, the connection, the writer and the stream's id of the last call.
        resets: the ids of the streams that the client left.
    """

    def __init__(self, answers):
        self.answers, self.at_headers = answers, {}
        self.is_silent = False
        self.num_connections = self.num_pings = 0
        self.calls, self.resets = {}, []
        self.changed = asyncio.Event()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()

    async def until(self, condition):
        """Returns once a condition holds that what the client sends brings about."""
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def say(self, path, *steps):
        """Sends more on the last call of a path: each step is given h2's connection and the stream's id."""
        connection, writer, stream_id = self.calls[path]
        for step in steps:
            more = step(connection, stream_id)
            writer.write(connection.data_to_send() + (more or b""))

    def answer(self, path):
        """Ends the last call of a path as a server should."""
        self.say(path, well)

    async def send(self, path, data):
        """Sends data on the last call of a path, as the client's windows let it."""
        connection, _, stream_id = self.calls[path]
        while data:
            size = min(
                connection.local_flow_control_window(stream_id), connection.max_outbound_frame_size, len(data)
            )
            if size:
                self.say(
                    path,
                    lambda connection, stream_id, part=data[:size]: connection.send_data(stream_id, part),
                )
                data = data[size:]
            else:
                self.changed.clear()
                await self.changed.wait()

    async def _serve(self, reader, writer):
        self.num_connections += 1
        config = h2.config.H2Configuration(
            client_side=False, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        connection = h2.connection.H2Connection(config)
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        paths = {}
        try:
            while data := await reader.read(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.RequestReceived):
                        path = paths[event.stream_id] = dict(event.headers)[b":path"].decode()
                        if path in self.at_headers:
                            self.calls[path] = connection, writer, event.stream_id
                            self.say(path, self.at_headers[path])
                    elif (
                        isinstance(event, h2.events.StreamEnded)
                        and paths[event.stream_id] not in self.at_headers
                    ):
                        path = paths[event.stream_id]
                        self.calls[path] = connection, writer, event.stream_id
                        self.say(path, self.answers.get(path, well))
                    elif isinstance(event, h2.events.StreamReset):
                        self.resets.append(event.stream_id)
                    elif isinstance(event, h2.events.PingReceived):
                        self.num_pings += 1
                    self.changed.set()
                if not self.is_silent:
                    writer.write(connection.data_to_send())
        except (ConnectionError, asyncio.CancelledError):
            return  # the client has left, or the test has ended
        finally:
            writer.close()
