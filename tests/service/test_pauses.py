"""A client of the real engine that stops reading: its request is paused, goes on, or ends; others do not notice."""

import asyncio
import time

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
RESOURCE_EXHAUSTED = 8
LENGTH = 500
PENDING = 64


@pytest.fixture
def start_in_step(start_daemon, in_step):
    """Starts a daemon whose engine waits for its readers' buffers, and so is paused in time."""

    async def start(engine, **options):
        return await start_daemon(in_step(engine), **options)

    return start


@pytest.fixture
def stop_reading(open_raw, framed, eventually):
    """A client that asks for `LENGTH` tokens and reads none: returns its connection and stream once it was paused."""

    async def start(daemon, length=LENGTH, num_samples=1):
        connection = await open_raw(initial_window=0, address=daemon.address)
        sampling = pb.SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, n=num_samples)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling)
        stream_id = connection.request(GENERATE, framed(request))
        await connection.flush()

        async def was_paused():
            stats = await asyncio.to_thread(daemon.engine.stats)  # it waits for a step, the loop must not
            return stats.num_pauses == 1

        await eventually(was_paused)
        return connection, stream_id

    return start


async def read_all(connection, stream_id):
    """Opens the window; returns the tokens and the usage."""
    connection.h2.increment_flow_control_window(2**24, stream_id)
    await connection.flush()
    assert (await connection.status(stream_id))[0] == 0
    messages, data = [], connection.data_of(stream_id)
    while data:
        length = int.from_bytes(data[1:5], "big")
        messages.append(pb.GenerateResponse.FromString(data[5 : 5 + length]))
        data = data[5 + length :]
    tokens = [token for message in messages for delta in message.deltas for token in delta.token_ids]
    return tokens, messages[-1].usage


def expected_tokens(engine, length=LENGTH):
    """What the model says when nobody is slow."""
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    return engine.engine.generate([[5, 6, 7]], params)[0].outputs[0].token_ids


async def test_a_paused_client_costs_nothing_and_goes_on_with_the_same_tokens(
    start_in_step, make_real_engine, make_small_engine, stop_reading, collect
):
    daemon = await start_in_step(make_real_engine(max_pending_tokens=PENDING), stall_timeout=20.0)
    connection, stream_id = await stop_reading(daemon)
    made = daemon.engine.timing().num_new_tokens
    assert PENDING < made < PENDING + 10
    held = daemon.engine.stats().blocks_active
    async with Client(daemon.address) as client:
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        deltas = await asyncio.gather(*(collect(client.generate([place], params)) for place in range(3)))
        assert [each[-1].usage.output_tokens for each in deltas] == [40] * 3
        assert (await client.health()) == "SERVING"
    assert daemon.engine.timing().num_new_tokens - made == 3 * 40
    stats = daemon.engine.stats()
    assert (stats.num_paused, stats.num_running, stats.blocks_active) == (1, 0, held)
    tokens, usage = await read_all(connection, stream_id)
    assert tokens == expected_tokens(make_small_engine(num_blocks=65))
    assert (usage.preemptions, usage.stalled_ms, usage.output_tokens) == (0, 0.0, LENGTH)
    stats = daemon.engine.stats()
    assert (stats.num_paused, stats.blocks_active) == (0, 0)
    assert stats.num_pauses >= 1
    await connection.close()


async def test_a_paused_client_gives_way_and_its_pause_is_no_stall(
    start_in_step, make_small_engine, stop_reading, collect
):
    """12 blocks: neither the paused client's 7 nor the other's 9 leave room for both."""
    engine = make_small_engine(num_blocks=13, admission="watermark", watermark=0.0)
    engine._max_pending_tokens = PENDING
    daemon = await start_in_step(engine, stall_timeout=20.0)
    connection, stream_id = await stop_reading(daemon, length=150)
    async with Client(daemon.address) as client:
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        usage = (await collect(client.generate([9] * 40, params)))[-1].usage
        assert (usage.preemptions, usage.output_tokens) == (0, 100)
        before = engine.stats()
        assert (before.num_paused, before.blocks_active, before.preemptions) == (1, 0, 1)
    before_resumed = time.monotonic()
    tokens, usage = await read_all(connection, stream_id)
    most_ms = 1000.0 * (time.monotonic() - before_resumed)  # nothing of the pause, which was before
    assert tokens == expected_tokens(make_small_engine(num_blocks=65), 150)
    assert usage.preemptions == 1
    assert 0.0 < usage.stalled_ms < most_ms
    await connection.close()


async def test_a_client_that_stays_away_is_ended_with_a_status_while_others_go_on(
    start_in_step, make_real_engine, stop_reading, eventually
):
    """The first token of each of its samples is more than may wait: the pause comes with what it does not read."""
    daemon = await start_in_step(make_real_engine(max_pending_tokens=PENDING), stall_timeout=0.3)
    num_read = 0
    async with Client(daemon.address) as client:

        async def read():
            nonlocal num_read
            params = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
            async for delta in client.generate([3], params):
                num_read += len(delta.token_ids)

        reading = asyncio.create_task(read())
        connection, stream_id = await stop_reading(daemon, length=10, num_samples=PENDING + 2)
        status, message = await connection.status(stream_id)
        assert status == RESOURCE_EXHAUSTED
        assert "read nothing for 0.3 s" in message
        num_before = num_read

        async def goes_on():
            return num_read > num_before

        await eventually(goes_on)
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def is_empty():
        stats = await asyncio.to_thread(daemon.engine.stats)
        return (stats.num_paused, stats.num_live_requests, stats.blocks_active) == (0, 0, 0)

    await eventually(is_empty)
    await connection.close()
