"""A server that vanishes without a word is found by a PING, and its calls end."""

import asyncio
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes

from pykv import client as client_module
from pykv.client import LEAST_KEEPALIVE_SECONDS, Client, ServiceError
from pykv.errors import ConfigError
from pykv.service.transport import TransportLimits
from pykv.service.transport.goaway import goaway

SILENCE = r"UNAVAILABLE: the server sent nothing for 0\.1 s and did not answer a ping within 0\.1 s"
QUICK = {"keepalive_seconds": 0.1, "keepalive_timeout_seconds": 0.1}
MODEL = b"\0\0\0\0\0"  # a message without a field


@pytest.fixture
def quick(monkeypatch):
    """Lets clients ask as soon as QUICK has it."""
    monkeypatch.setattr(client_module, "LEAST_KEEPALIVE_SECONDS", 0.0)


class RawServer:
    """Takes calls by hand.

    Attributes:
        answers_pings: else it says nothing from the first call on.
        num_connections, num_pings: that came.
        called, pinged: set by each call, and by each ping.
    """

    def __init__(self):
        self.answers_pings = False
        self.num_connections = self.num_pings = 0
        self.called, self.pinged = asyncio.Event(), asyncio.Event()
        self.open_calls = []

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield "{}:{}".format(*server.sockets[0].getsockname())
        finally:
            server.close()

    async def pings(self, times):
        async with asyncio.timeout(20):
            while self.num_pings < times:
                self.pinged.clear()
                await self.pinged.wait()

    def answer(self):
        """Ends all calls, each with one message."""
        for connection, writer, stream_id in self.open_calls:
            connection.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
            connection.send_data(stream_id, MODEL)
            connection.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
            writer.write(connection.data_to_send())
        self.open_calls.clear()

    def send_away(self, reason):
        """Says goodbye to who has calls, as to one who asks too much."""
        for _, writer, stream_id in self.open_calls:
            writer.write(goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, reason))

    async def _serve(self, reader, writer):
        self.num_connections += 1
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        try:
            while data := await reader.read(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, h2.events.StreamEnded):
                        self.open_calls.append((connection, writer, event.stream_id))
                        self.called.set()
                    elif isinstance(event, h2.events.PingReceived):
                        self.num_pings += 1
                        self.pinged.set()
                if self.answers_pings:
                    writer.write(connection.data_to_send())
        except ConnectionError:
            return
        finally:
            writer.close()


@pytest.mark.asyncio
async def test_all_calls_of_a_server_that_vanished_end_and_the_next_makes_a_new_connection(quick):
    server = RawServer()
    async with server.running() as address, Client(address, **QUICK) as client, asyncio.timeout(20):
        calls = [
            asyncio.ensure_future(anext(client.generate("a"))),
            asyncio.ensure_future(client.get_model()),
        ]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            with pytest.raises(ServiceError, match=SILENCE):
                raise ended
        assert (server.num_connections, server.num_pings) == (1, 1)
        server.answers_pings = True
        server.called.clear()
        server.open_calls.clear()
        call = asyncio.ensure_future(client.get_model())
        await server.called.wait()
        server.answer()
        assert (await call).name == ""
        assert server.num_connections == 2


@pytest.mark.asyncio
async def test_a_server_that_answers_is_waited_for_and_one_without_calls_is_not_asked(quick):
    server = RawServer()
    server.answers_pings = True
    async with server.running() as address, Client(address, **QUICK) as client, asyncio.timeout(20):
        call = asyncio.ensure_future(client.get_model())
        await server.pings(4)
        server.answer()
        await call
        keepalive = client._channel._protocol._keepalive
        before = server.num_pings
        keepalive.stop()
        keepalive._last_heard -= 1000.0  # a long silence
        keepalive._ask()
        assert keepalive._was_heard, "it was not asked"
        call = asyncio.ensure_future(client.get_model())
        await server.pings(before + 2)
        server.answer()
        await call
        assert server.num_connections == 1


@pytest.mark.asyncio
async def test_a_closed_client_asks_nobody(quick):
    server = RawServer()
    async with server.running() as address:
        client = Client(address, **QUICK)
        call = asyncio.ensure_future(client.get_model())
        await server.called.wait()
        protocol = client._channel._protocol
        await client.aclose()
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            await call
        assert protocol._keepalive is None


@pytest.mark.asyncio
@pytest.mark.parametrize("said", ["too_many_pings", "something else"])
async def test_a_goodbye_because_of_pings_says_so(said):
    server = RawServer()
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        call = asyncio.ensure_future(client.get_model())
        await server.called.wait()
        server.send_away(said)
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: ") as raised:
            await call
        assert ("keepalive_seconds" in str(raised.value)) == (said == "too_many_pings")
        server.called.clear()
        server.open_calls.clear()
        call = asyncio.ensure_future(client.get_model())
        await server.called.wait()
        server.answer()
        await call
        assert server.num_connections == 2


@pytest.mark.asyncio
async def test_who_asks_the_daemon_too_often_is_told(start_daemon, quick):
    daemon = await start_daemon(min_recv_ping_interval_without_data=60.0, max_ping_strikes=2)
    daemon.engine.hold()
    client = Client(daemon.address, keepalive_seconds=0.01, keepalive_timeout_seconds=0.01)
    async with client, asyncio.timeout(20):
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: the server closed .* too_many_pings"):
            await anext(client.generate("a"))


@pytest.mark.parametrize("seconds", [1, 4.999])
def test_a_client_that_would_be_sent_away_for_asking_is_refused(seconds):
    why = r"a finite number of at least 5, since the server closes a connection that asks more often"
    with pytest.raises(ConfigError, match=f"^keepalive_seconds is {seconds}: allowed is {why}"):
        Client(keepalive_seconds=seconds)
    assert Client(keepalive_seconds=5)._keepalive_seconds == 5.0


def test_the_daemon_lets_the_client_ask_as_often_as_it_does():
    assert Client()._keepalive_seconds > TransportLimits().min_ping_interval_seconds
    assert TransportLimits().min_ping_interval_seconds == LEAST_KEEPALIVE_SECONDS
    assert Client(keepalive_seconds=None)._keepalive_seconds is None


@pytest.mark.parametrize("name", ["keepalive_seconds", "keepalive_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "30"])
def test_a_number_of_seconds_that_is_none_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        Client(**{name: value})
