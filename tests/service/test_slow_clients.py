"""A client that does not read is bounded, and nobody waits for it."""

import asyncio

import pytest

from pykv.client import Client
from pykv.engine.outputs import OutputDelta, Usage
from pykv.sampling import SamplingParams
from pykv.service.errors import ClientTooSlowError
from pykv.service.outbox import Outbox
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
RESOURCE_EXHAUSTED = 8


def asking(num_tokens):
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling)


def delta(token_id, index=0, **values):
    return OutputDelta("x", index, (token_id,), f"{token_id} ", **values)


async def test_deltas_that_wait_leave_as_one_message():
    outbox = Outbox("x", 10_000)
    for token_id in range(5):
        outbox.add(delta(token_id))
    outbox.add(delta(9, index=1))
    message = await outbox.take()
    assert [(list(each.token_ids), each.text) for each in message.deltas] == [
        ([0, 1, 2, 3, 4], "0 1 2 3 4 "),
        ([9], "9 "),
    ]
    assert outbox.held_bytes == 0


async def test_the_name_is_said_once():
    outbox = Outbox("x", 10_000)
    outbox.add(delta(1))
    first = await outbox.take()
    outbox.add(delta(2))
    assert (first.request_id, (await outbox.take()).request_id) == ("x", "")


async def test_more_than_may_wait_is_refused_and_what_waits_is_kept():
    outbox = Outbox("x", 1000)
    for token_id in range(6):
        outbox.add(delta(token_id))
    assert outbox.held_bytes <= 1000
    with pytest.raises(ClientTooSlowError, match="1000"):
        outbox.add(delta(6))
    assert list((await outbox.take()).deltas[0].token_ids) == list(range(6))


async def test_one_large_delta_is_taken_whole():
    outbox = Outbox("x", 1000)
    outbox.add(OutputDelta("x", 0, tuple(range(5000)), "y" * 5000))
    assert len((await outbox.take()).deltas[0].token_ids) == 5000


async def test_an_error_comes_after_what_was_there_before_it():
    outbox = Outbox("x", 1000)
    outbox.add(delta(1, usage=Usage(1, 0, 1, 0, 0)))
    outbox.close(ZeroDivisionError())
    assert (await outbox.take()).usage.output_tokens == 1
    with pytest.raises(ZeroDivisionError):
        await outbox.take()


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
    token_ids = [token for message in messages for each in message.deltas for token in each.token_ids]
    assert token_ids == [token % 1000 for token in range(6, 1006)]
    await connection.close()


def split(data):
    while data:
        length = int.from_bytes(data[1:5], "big")
        yield pb.GenerateResponse.FromString(data[5 : 5 + length])
        data = data[5 + length :]


async def test_a_client_that_never_reads_loses_its_request_and_others_go_on(start_daemon, open_raw, framed):
    daemon = await start_daemon(stream_buffer=64 * 1024, stall_timeout=0.2)
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


async def test_a_client_that_reads_again_gets_all_that_waited_and_then_the_status(
    start_daemon, open_raw, framed
):
    daemon = await start_daemon(stream_buffer=8 * 1024, stall_timeout=20.0)
    connection = await open_raw(initial_window=0, address=daemon.address)
    stream_id = connection.request(GENERATE, framed(asking(100_000)))
    await connection.flush()
    await daemon.engine.until(lambda: daemon.engine.aborted)
    connection.h2.increment_flow_control_window(2**20, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == RESOURCE_EXHAUSTED
    messages = split(connection.data_of(stream_id))
    token_ids = [token for message in messages for each in message.deltas for token in each.token_ids]
    assert token_ids == [token % 1000 for token in range(6, 6 + len(token_ids))]
    assert len(token_ids) > 10
    await connection.close()


async def test_a_connection_whose_socket_is_full_is_cut_off(start_daemon, open_raw, framed):
    """The windows are wide open; the client leaves the bytes in the socket."""
    daemon = await start_daemon(stall_timeout=0.2, stream_buffer=2**30)
    connection = await open_raw(initial_window=2**31 - 1, address=daemon.address)
    connection.h2.increment_flow_control_window(2**31 - 1 - 65_535)
    connection.reader._limit = 1  # pauses the reading of the socket
    text = OutputDelta("x", 0, (1,), "y" * 2**20)
    daemon.engine.scripts["big"] = [text] * 100
    connection.request(GENERATE, framed(pb.GenerateRequest(text="big")))
    await connection.flush()
    await daemon.engine.until(lambda: daemon.engine.aborted or daemon.engine.finished)
    async with asyncio.timeout(20):
        await daemon.daemon._calls.wait_idle()
    assert daemon.daemon._server.num_connections == 0
    connection.abort()
