"""Clients that want to use the daemon up: each is bounded by a named option, and the others go on."""

import asyncio
import socket

import h2.errors
import h2.events
import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import TransportLimits, arrivals
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.peers import Peers, peer_of

GENERATE = "/pykv.v1.Engine/Generate"
RESOURCE_EXHAUSTED = 8
CALM = h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def sent_away(connection):
    """The error with which the server closes the connection, and its reason."""
    event = await connection.wait_for(h2.events.ConnectionTerminated)
    return event.error_code, event.additional_data.decode()


async def still_serves(address):
    async with Client(address) as client:
        params = SamplingParams(max_tokens=3)
        deltas = [delta async for delta in client.generate([5], params)]
        assert sum(len(delta.token_ids) for delta in deltas) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_peer"])
async def test_a_connection_too_many_is_told_so_and_another_may_come_when_one_goes(
    start_daemon, raw_open, limit, eventually
):
    daemon = await start_daemon(**{limit: 2}, connections_per_second=1000.0)
    first, second = [await raw_open(daemon.address) for _ in range(2)]
    third = await raw_open(daemon.address)
    assert await sent_away(third) == (CALM, f"{limit} is reached")
    assert daemon.daemon._server.num_refused == {limit: 1}
    assert daemon.daemon._server.num_connections == 2
    stream_id = first.request(GENERATE, b"")
    await first.flush()
    await first.status(stream_id)
    await second.close()

    async def has_gone():
        return daemon.daemon._server.num_connections == 1

    await eventually(has_gone)
    await still_serves(daemon.address)
    await first.close()
    await third.close()


@pytest.mark.asyncio
async def test_who_connects_too_often_must_wait(start_daemon, raw_open, eventually):
    daemon = await start_daemon(max_connections_per_peer=3, connections_per_second=0.1)
    for _ in range(3):
        await (await raw_open(daemon.address)).close()

    async def have_gone():
        return daemon.daemon._server.num_connections == 0

    await eventually(have_gone)
    connection = await raw_open(daemon.address)
    assert await sent_away(connection) == (CALM, "connections_per_second is reached")
    await connection.close()


@pytest.mark.asyncio
async def test_with_no_more_files_connections_wait_until_there_are_some(
    daemon, eventually, monkeypatch, caplog, no_more_files
):
    monkeypatch.setattr(arrivals, "RETRY_SECONDS", 0.05)
    client = socket.socket()
    client.setblocking(False)
    host, port = daemon.address.split(":")
    with no_more_files():
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))

        async def is_told():
            return "no connection can be accepted" in caplog.text

        await eventually(is_told)
    reader, writer = await asyncio.open_connection(sock=client)
    async with asyncio.timeout(10):
        assert (await reader.readexactly(9))[3] == 4  # SETTINGS
    writer.close()
    await still_serves(daemon.address)


def test_peers_are_counted_apart_and_their_allowance_fills_with_time():
    now = [0.0]
    limits = TransportLimits(max_connections=4, max_connections_per_peer=2, connections_per_second=1.0)
    peers = Peers(limits, lambda: now[0])
    assert [peers.admit("a") for _ in range(3)] == [None, None, "max_connections_per_peer"]
    peers.leave("a")
    assert peers.admit("a") == "connections_per_second"
    now[0] = 1.0
    assert [peers.admit("a"), peers.admit("b"), peers.admit("b")] == [None, None, None]
    assert peers.admit("c") == "max_connections"
    for place in range(20_000):
        peers.admit(str(place))
    assert len(peers._peers) < 5000
    assert peers._peers["a"].num_open == 2


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (("2001:db8::5:6:7:8", 1, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_ipv6(address, peer):
    assert peer_of(address) == peer


@pytest.mark.asyncio
async def test_a_request_in_single_bytes_closes_its_connection(start_daemon, raw_open):
    # The burst is the default one; it fills up slowly, however long a loaded machine takes to send the frames.
    daemon = await start_daemon(control_frames_per_second=1.0)
    connection = await raw_open(daemon.address)
    stream_id = connection.request(GENERATE, end_stream=False)
    for _ in range(11_000):
        connection.h2.send_data(stream_id, b"x")
    await connection.flush()
    assert await sent_away(connection) == (CALM, "too many resets, control frames or header fields")
    await still_serves(daemon.address)
    await connection.close()


@pytest.mark.asyncio
async def test_the_options_of_control_frames_are_heeded(start_daemon, raw_open):
    daemon = await start_daemon(control_frames_burst=20, control_frames_per_second=1.0)
    connection = await raw_open(daemon.address)
    for _ in range(25):
        connection.h2.ping(b"12345678")
    await connection.flush()
    assert (await sent_away(connection))[0] == CALM
    await still_serves(daemon.address)
    await connection.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("part", [b"", b"\x00\x00", b"\x00\x00\x00\x00\x20half"])
async def test_a_request_that_does_not_come_in_time_is_ended(start_daemon, raw_open, part):
    daemon = await start_daemon(request_timeout=0.2)
    connection = await raw_open(daemon.address)
    stream_id = connection.request(GENERATE, part, end_stream=False)
    await connection.flush()
    status, message = await connection.status(stream_id)
    assert status == RESOURCE_EXHAUSTED
    assert message == "the request message did not come within 0.2 s"
    assert len(daemon.daemon._calls) == 0
    await still_serves(daemon.address)
    await connection.close()


@pytest.mark.asyncio
async def test_a_stream_may_last_longer_than_its_request_may_take(start_daemon, raw_open, framed):
    daemon = await start_daemon(request_timeout=0.1)
    daemon.engine.hold()
    connection = await raw_open(daemon.address)
    sampling = pb.SamplingParams(max_tokens=2)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)
    stream_id = connection.request(GENERATE, framed(request))
    await connection.flush()
    asyncio.get_running_loop().call_later(0.4, daemon.engine.release)
    assert (await connection.status(stream_id))[0] == 0
    await connection.close()


BEGINNINGS = {
    "nothing": b"",
    "half a preface": PREFACE[:10],
    "a preface alone": PREFACE,
    "half a frame": PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x08",
    "headers without an end": PREFACE
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x83",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
async def test_a_connection_that_does_not_go_on_is_closed(start_daemon, beginning):
    daemon = await start_daemon(request_timeout=0.2)
    reader, writer = await asyncio.open_connection(*daemon.address.rsplit(":", 1))
    writer.write(beginning)
    async with asyncio.timeout(10):
        received = await reader.read()
    assert received.endswith(b"the rest of a frame did not come in time")
    assert daemon.daemon._server.num_connections == 0
    await still_serves(daemon.address)
    writer.close()


@pytest.mark.asyncio
async def test_an_idle_connection_and_one_that_sends_slowly_stay(start_daemon, raw_open, framed):
    daemon = await start_daemon(request_timeout=0.4)
    connection = await raw_open(daemon.address)
    await asyncio.sleep(0.6)
    request = framed(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=1))
    )
    stream_id = connection.request(GENERATE, request)
    data = connection.h2.data_to_send()
    for place in range(0, len(data), 20):
        connection.writer.write(data[place : place + 20])
        await asyncio.sleep(0.01)
    assert (await connection.status(stream_id))[0] == 0
    await connection.close()


def test_the_meter_knows_when_a_frame_or_its_headers_are_not_done():
    meter = FrameMeter(TransportLimits())
    seen = [meter.is_amid]
    headers = b"\x00\x00\x02\x01\x00\x00\x00\x00\x01ab"
    continuation = b"\x00\x00\x01\x09\x04\x00\x00\x00\x01c"
    for part in (PREFACE, headers, continuation[:4], continuation[4:], headers[:5]):
        meter.read(part)
        seen.append(meter.is_amid)
    assert seen == [True, True, True, True, False, True]
    assert meter.num_begun == 1
