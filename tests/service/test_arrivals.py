"""Connections that arrive as the daemon ends, on the event loop that it runs on."""

import asyncio
import socket

import pytest
import uvloop

from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport.connection import ServerProtocol
from pykv.service.transport.writer import TickWriter

GENERATE = "/pykv.v1.Engine/Generate"
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=3))


@pytest.fixture
def on_uvloop():
    """Runs a coroutine to its end, soon: `on_uvloop(coroutine)`."""

    def run(coroutine):
        async def soon():
            async with asyncio.timeout(4):
                return await coroutine

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(soon())

    return run


def after_connection_made(monkeypatch, act):
    """Does something as each connection begins, before the task that began it goes on."""
    begin = ServerProtocol.connection_made

    def begin_and_act(self, transport):
        begin(self, transport)
        act()

    monkeypatch.setattr(ServerProtocol, "connection_made", begin_and_act)


def test_a_connection_that_begins_as_the_daemon_stops_to_listen_is_served_and_ended(
    on_uvloop, start_daemon_in, make_engine, raw_open, framed, monkeypatch
):
    async def arrive():
        daemon, stop = await start_daemon_in(make_engine())
        server = daemon.daemon._server
        after_connection_made(monkeypatch, server.stop_listening)
        connection = await raw_open(daemon.address)
        stream = connection.request(GENERATE, framed(REQUEST))
        await connection.flush()
        assert (await connection.status(stream))[0] == 0
        await stop()
        await connection.reader.read()  # to its end
        await connection.close()
        assert (server.num_connections, server._connections) == (0, set())

    on_uvloop(arrive())


def test_a_connection_that_was_accepted_but_has_not_begun_when_the_server_ends_is_closed(
    on_uvloop, start_daemon_in, make_engine
):
    async def arrive():
        daemon, stop = await start_daemon_in(make_engine())
        server = daemon.daemon._server
        host, port = daemon.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            server._arrivals._accept()
            assert (server.num_connections, server._connections) == (1, set())
            await server.end()
            assert (server.num_connections, server._connections) == (0, set())
            while await asyncio.get_running_loop().sock_recv(client, 65536):
                pass
        await stop()

    on_uvloop(arrive())


def test_a_write_to_a_socket_that_was_closed_behind_its_transport_is_dropped(on_uvloop, caplog):
    """uvloop closes it so when what makes the connection is cancelled as it begins."""

    class Cancelling(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            task.cancel()

    async def write():
        nonlocal task
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with theirs:
            loop, protocol = asyncio.get_running_loop(), Cancelling()
            task = asyncio.create_task(loop.connect_accepted_socket(lambda: protocol, ours))
            await asyncio.wait({task})
            assert task.cancelled()
            assert not protocol.transport.is_closing()
            writer = TickWriter(protocol.transport)
            writer.write(b"x")
            writer.close()
            assert theirs.recv(1) == b""

    task = None
    on_uvloop(write())
    assert "connection closed" in caplog.text
