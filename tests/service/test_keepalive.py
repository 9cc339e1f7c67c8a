"""Peers that vanish without a word are found by a PING, and those that ping too often are sent away."""

import asyncio

import h2.errors
import h2.events
import pytest

from pykv.client import Client
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import TransportLimits
from pykv.service.transport.ping_strikes import PingStrikes

GENERATE = "/pykv.v1.Engine/Generate"
QUICK = {"keepalive_time": 0.1, "keepalive_timeout": 0.1}
UNANSWERED = "a keepalive ping was not answered in time"


def asking(num_tokens):
    sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)


def reasons(caplog):
    return [record.reason for record in caplog.records if record.getMessage() == "connection closed"]


async def has_gone(daemon, eventually):
    async def is_alone():
        return daemon.daemon._server.num_connections == 0

    await eventually(is_alone)


@pytest.mark.asyncio
async def test_an_idle_connection_whose_peer_has_vanished_is_closed(
    start_daemon, raw_open, eventually, caplog
):
    daemon = await start_daemon(**QUICK)
    connection = await raw_open(daemon.address)  # from now on it reads nothing, and says nothing
    await has_gone(daemon, eventually)
    assert reasons(caplog) == [UNANSWERED]
    assert not daemon.daemon._server._connections
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in daemon.daemon._collector.collect()
        for sample in family.samples
    }
    assert metrics["pykv:connections_closed_total", "vanished"] == 1
    assert metrics["pykv:connections_closed_total", "pings"] == 0
    connection.abort()


@pytest.mark.asyncio
async def test_the_calls_of_a_peer_that_has_vanished_end_and_their_blocks_are_free(
    start_daemon, make_real_engine, open_raw, framed, eventually, caplog
):
    engine = make_real_engine(max_pending_tokens=16)
    daemon = await start_daemon(engine, **QUICK)
    connection = await open_raw(initial_window=0, address=daemon.address)
    connection.request(GENERATE, framed(asking(400)))
    await connection.flush()
    answering = asyncio.create_task(connection.answer())

    async def is_paused():
        return engine.stats().num_paused == 1

    await eventually(is_paused)
    answering.cancel()
    assert engine.stats().blocks_active > 0
    await has_gone(daemon, eventually)
    await daemon.daemon._calls.wait_idle()

    async def is_free():
        return engine.stats().blocks_active == engine.stats().num_live_requests == 0

    await eventually(is_free)
    assert reasons(caplog) == [UNANSWERED]
    connection.abort()


@pytest.mark.asyncio
async def test_a_peer_that_answers_stays(start_daemon, raw_open, framed, caplog):
    daemon = await start_daemon(**QUICK)
    connection = await raw_open(daemon.address)
    for _ in range(4):
        await connection.wait_for(h2.events.PingReceived)
    stream_id = connection.request(GENERATE, framed(asking(3)))
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    assert not reasons(caplog)
    await connection.close()


@pytest.mark.asyncio
async def test_connections_without_calls_may_be_left_alone(start_daemon, raw_open, framed):
    daemon = await start_daemon(**QUICK, keepalive_permit_without_calls=False)
    daemon.engine.hold()
    idle, busy = [await raw_open(daemon.address) for _ in range(2)]
    busy.request(GENERATE, framed(asking(3)))
    await busy.flush()
    for _ in range(4):
        await busy.wait_for(h2.events.PingReceived)
    idle.h2.ping(b"12345678")
    await idle.flush()
    await idle.wait_for(h2.events.PingAckReceived)
    assert not [event for event in idle.events if isinstance(event, h2.events.PingReceived)]
    daemon.engine.release()
    await idle.close()
    await busy.close()


async def ping(connection, times):
    for _ in range(times):
        connection.h2.ping(b"12345678")
        await connection.flush()
        await connection.wait_for(h2.events.PingAckReceived)


@pytest.mark.asyncio
async def test_who_pings_too_often_is_sent_away_with_the_word_that_clients_of_grpc_know(
    start_daemon, raw_open, caplog
):
    daemon = await start_daemon(max_ping_strikes=2, min_recv_ping_interval_without_data=3600.0)
    connection = await raw_open(daemon.address)
    await ping(connection, 3)  # the first is free, and two are forgiven
    connection.h2.ping(b"12345678")
    await connection.flush()
    goodbye = await connection.wait_for(h2.events.ConnectionTerminated)
    assert goodbye.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert goodbye.additional_data == b"too_many_pings"
    async with Client(daemon.address) as client:
        assert await client.health() == "SERVING"
    assert reasons(caplog) == ["too_many_pings"]
    await connection.close()


@pytest.mark.asyncio
async def test_pings_between_answers_are_no_strikes(start_daemon, open_raw, framed):
    """Clients measure with them how fast data comes."""
    daemon = await start_daemon(max_ping_strikes=1, min_recv_ping_interval_without_data=3600.0)
    connection = await open_raw(initial_window=0, address=daemon.address)
    stream_id = connection.request(GENERATE, framed(asking(1000)))
    await connection.flush()
    for _ in range(5):
        await ping(connection, 2)
        connection.h2.increment_flow_control_window(100, stream_id)
        await connection.flush()
        await connection.begun(stream_id)
        del connection.data[stream_id]
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    await connection.close()


@pytest.mark.asyncio
async def test_a_flood_of_pings_ends_a_call_of_that_connection_alone(start_daemon, raw_open, framed):
    daemon = await start_daemon(max_ping_strikes=2)
    daemon.engine.hold()
    flooding, other = [await raw_open(daemon.address) for _ in range(2)]
    flooding.request(GENERATE, framed(asking(3)))
    kept = other.request(GENERATE, framed(asking(3)))
    for connection in (flooding, other):
        await connection.flush()
    await daemon.engine.until(lambda: len(daemon.engine.live) == 2)
    for _ in range(50):
        flooding.h2.ping(b"12345678")
    await flooding.flush()
    await daemon.engine.until(lambda: len(daemon.engine.aborted) == 1)
    daemon.engine.release()
    async with asyncio.timeout(20):
        assert (await other.status(kept))[0] == 0
    await other.close()
    flooding.abort()


def test_strikes_are_counted_by_the_time_between_pings():
    now = [0.0]
    limits = TransportLimits(max_ping_strikes=1, min_ping_interval_seconds=5.0)
    strikes = PingStrikes(limits, lambda: now[0])
    for _ in range(10):
        strikes.count(has_calls=False)
        now[0] += 5.0
    assert not strikes.are_too_many
    now[0] -= 0.5
    strikes.count(has_calls=False)
    assert not strikes.are_too_many
    strikes.count(has_calls=True)
    assert strikes.are_too_many
    strikes.forgive()
    assert not strikes.are_too_many


def test_without_calls_a_client_may_be_held_to_silence():
    now = [0.0]
    limits = TransportLimits(max_ping_strikes=1, keepalive_permit_without_calls=False)
    strikes = PingStrikes(limits, lambda: now[0])
    for has_calls in (True, True, True, False, False):
        assert not strikes.are_too_many
        strikes.count(has_calls=has_calls)
        now[0] += 60.0
    assert strikes.are_too_many
