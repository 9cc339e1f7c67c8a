"""A client that does not read is bounded, and nobody waits for it."""

import asyncio

import pytest

from pykv.client import Client
from pykv.engine.outputs import OutputDelta
from pykv.errors import EngineDeadError, OutOfBlocksError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import Offence

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 8, 13, 14


def asking(num_tokens):
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)


async def test_tokens_that_were_made_while_the_client_was_away_come_merged(open_raw, framed, engine):
    connection = await open_raw(initial_window=0)
    stream_id = connection.request(GENERATE, framed(asking(1000)))
    await connection.flush()
    await engine.until(lambda: engine.finished)
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    messages = list(split(connection.data_of(stream_id)))
    assert len(messages) < 10
    assert token_ids(connection.data_of(stream_id)) == [token % 1000 for token in range(6, 1006)]
    await connection.close()


def token_ids(data):
    deltas = [delta for message in split(data) for delta in message.deltas]
    return [token for delta in deltas for token in delta.token_ids]


def split(data):
    while data:
        length = int.from_bytes(data[1:5], "big")
        yield pb.GenerateResponse.FromString(data[5 : 5 + length])
        data = data[5 + length :]


async def test_a_client_that_never_reads_loses_its_request_and_others_go_on(start_daemon, open_raw, framed):
    daemon = await start_daemon(stall_timeout=0.2)
    connection = await open_raw(initial_window=1000, address=daemon.address)
    stalled = connection.request(GENERATE, framed(asking(100_000)))
    await connection.flush()
    async with Client(daemon.address) as client:
        others = [count(client, 300) for _ in range(20)]
        assert await asyncio.gather(*others) == [300] * 20
        await daemon.engine.until(lambda: not daemon.engine.live)
        assert len(daemon.engine.aborted) == 1
        status, message = await connection.status(stalled)
        assert status == RESOURCE_EXHAUSTED
        assert "client" in message
    await connection.close()


async def count(client, num_tokens):
    stream = client.generate([5], SamplingParams(max_tokens=num_tokens))
    return sum([len(delta.token_ids) async for delta in stream])


async def test_a_request_waits_for_its_client_while_too_much_is_unread(
    start_daemon, make_engine, open_raw, framed
):
    daemon = await start_daemon(make_engine(max_pending_tokens=100), stall_timeout=20.0)
    connection = await open_raw(initial_window=0, address=daemon.address)
    stream_id = connection.request(GENERATE, framed(asking(1000)))
    await connection.flush()
    await daemon.engine.until(lambda: any(channel.is_paused for channel in daemon.engine.live.values()))
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    assert token_ids(connection.data_of(stream_id)) == [token % 1000 for token in range(6, 1006)]
    assert not daemon.engine.aborted
    await connection.close()


async def test_a_client_that_reads_again_gets_every_token_in_order(open_raw, framed, engine):
    connection = await open_raw(initial_window=100)
    stream_id = connection.request(GENERATE, framed(asking(3000)))
    await connection.flush()
    await engine.until(lambda: engine.finished)
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    assert token_ids(connection.data_of(stream_id)) == [token % 1000 for token in range(6, 3006)]
    await connection.close()


async def test_a_connection_whose_socket_is_full_is_cut_off_and_told_of(
    start_daemon, open_raw, framed, caplog
):
    """The windows are wide open; the client leaves the bytes in the socket."""
    daemon = await start_daemon(stall_timeout=0.2)
    connection = await open_raw(initial_window=2**31 - 1, address=daemon.address)
    connection.h2.increment_flow_control_window(2**31 - 1 - 65_535)
    connection.reader._limit = 1  # pauses the reading of the socket
    text = OutputDelta("x", 0, (1,), "y" * 2**20)
    daemon.engine.scripts["big"] = [text] * 100
    connection.request(GENERATE, framed(pb.GenerateRequest(text="big")))
    await connection.flush()
    async with asyncio.timeout(20):
        await daemon.engine.until(lambda: daemon.engine.aborted or daemon.engine.finished)
        await daemon.daemon._calls.wait_idle()
    assert daemon.daemon._server.num_connections == 0
    (reason,) = [record.reason for record in caplog.records if record.getMessage() == "connection closed"]
    assert reason == Offence.STALLED.value
    assert daemon.daemon._server.num_closed == {Offence.STALLED: 1}
    connection.abort()


FAILURES = {
    "engine dead": (EngineDeadError("the engine has ended"), UNAVAILABLE),
    "out of blocks": (OutOfBlocksError("no block is left"), RESOURCE_EXHAUSTED),
    "unforeseen": (ZeroDivisionError("a bug"), INTERNAL),
}


@pytest.mark.parametrize("window", [0, 3, 30])
@pytest.mark.parametrize(("error", "expected"), FAILURES.values(), ids=FAILURES)
async def test_who_reads_again_gets_what_was_made_and_how_it_failed_meanwhile(
    open_raw, framed, engine, error, expected, window
):
    """The window ends before the first message, in its prefix, or in its midst."""
    engine.scripts["fails"] = [*(OutputDelta("x", 0, (token,), "some text") for token in range(1, 9)), error]
    connection = await open_raw(initial_window=window)
    stream_id = connection.request(GENERATE, framed(pb.GenerateRequest(text="fails")))
    await connection.flush()
    await engine.until(lambda: engine.finished)
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == expected
    assert token_ids(connection.data_of(stream_id)) == list(range(1, 9))
    await connection.close()


@pytest.mark.parametrize("window", [0, 3, 30])
async def test_an_engine_that_dies_ends_the_call_of_a_client_that_does_not_read_with_its_status(
    start_daemon, make_engine, open_raw, framed, window
):
    """Nobody waits for the window: a status needs none."""
    daemon = await start_daemon(make_engine(max_pending_tokens=100))
    connection = await open_raw(initial_window=window, address=daemon.address)
    stream_id = connection.request(GENERATE, framed(asking(1000)))
    await connection.flush()
    await daemon.engine.until(lambda: any(channel.is_paused for channel in daemon.engine.live.values()))
    daemon.engine.error = EngineDeadError("the engine has ended")
    async with asyncio.timeout(20):
        await daemon.daemon._calls.wait_idle()  # before anything is read, by which the window would grow
    assert not daemon.engine.live
    assert (await connection.status(stream_id))[0] == UNAVAILABLE
    await connection.close()


async def test_who_empties_a_full_socket_gets_how_it_failed_meanwhile(open_raw, framed, engine):
    connection = await open_raw(initial_window=2**31 - 1)
    connection.h2.increment_flow_control_window(2**31 - 1 - 65_535)
    connection.reader._limit = 1  # pauses the reading of the socket
    parts = [OutputDelta("x", 0, (token,), "y" * 2**20) for token in range(1, 31)]
    engine.scripts["fails"] = [*parts, EngineDeadError("the engine has ended")]
    stream_id = connection.request(GENERATE, framed(pb.GenerateRequest(text="fails")))
    await connection.flush()
    await engine.until(lambda: engine.finished)
    assert (await connection.status(stream_id))[0] == UNAVAILABLE
    assert token_ids(connection.data_of(stream_id)) == list(range(1, 31))
    await connection.close()
