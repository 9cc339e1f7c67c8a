"""Overload is refused early, with a hint when to come again, and is fair between tenants."""

import asyncio
import gc
import hashlib
import os
import threading

import psutil
import pytest

from pykv.client import Client
from pykv.errors import InvalidRequestError, QueueFullError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class Held:
    """A daemon whose model waits until it is let go, and that counts what was encoded."""

    def __init__(self, engine, monkeypatch):
        self.may_run, self.engine, self.num_encoded = threading.Event(), engine, 0
        self.prefills = []
        runner, tokenizer = engine.engine.steps._runner, engine.engine.tokenizer
        forward, encode = runner.forward, tokenizer.encode

        def held_forward(step):
            assert self.may_run.wait(30)
            if len(step.token_ids) > 1:
                self.prefills.append(step.token_ids.tolist())
            return forward(step)

        def counted_encode(*arguments):
            self.num_encoded += 1
            return encode(*arguments)

        monkeypatch.setattr(runner, "forward", held_forward)
        monkeypatch.setattr(tokenizer, "encode", counted_encode)


@pytest.fixture
def start_held(start_daemon, make_small_engine, monkeypatch):
    async def start(daemon_options=None, **options):
        engine = make_small_engine(num_blocks=129, **options)
        held = Held(engine, monkeypatch)
        return await start_daemon(engine, **(daemon_options or {})), held

    return start


async def outcome(client, params=SHORT, prompt="hello"):
    """The tokens of a request, or its refusal."""
    try:
        return [token async for delta in client.generate(prompt, params) for token in delta.token_ids]
    except QueueFullError as error:
        return error


async def test_what_the_queue_has_no_room_for_is_refused_before_it_is_encoded(start_held, eventually):
    daemon, held = await start_held(max_num_seqs=2, max_queued_requests=8)
    async with Client(daemon.address) as client:
        tasks = [asyncio.create_task(outcome(client)) for _ in range(100)]

        async def are_refused():
            return sum(task.done() for task in tasks) >= 90

        await eventually(are_refused)
        refusals = [task.result() for task in tasks if task.done()]
        assert all(isinstance(refusal, QueueFullError) for refusal in refusals)
        assert all(0.1 <= refusal.retry_seconds <= 30 for refusal in refusals)
        assert held.num_encoded <= 10
        assert await client.health() == "SERVING"
        held.may_run.set()
        results = await asyncio.gather(*tasks)
        assert sum(isinstance(result, list) for result in results) >= 8
        assert len(await outcome(client)) == 4


async def test_each_sample_takes_a_place_of_the_queue(start_held, eventually):
    daemon, held = await start_held(max_num_seqs=8, max_queued_requests=8)
    async with Client(daemon.address) as client:
        first = asyncio.create_task(outcome(client))

        async def has_begun():
            return held.engine.stats().num_running == 1

        await eventually(has_begun)
        waiting = asyncio.create_task(outcome(client, SamplingParams(max_tokens=4, n=6, ignore_eos=True)))

        async def wait():
            return held.engine.stats().num_waiting == 6

        await eventually(wait)
        refusal = await outcome(client, SamplingParams(max_tokens=4, n=3))
        assert "6 samples wait and n is 3: allowed is 8" in str(refusal)
        last = asyncio.create_task(outcome(client, SamplingParams(max_tokens=4, n=2, ignore_eos=True)))
        held.may_run.set()
        assert [len(tokens) for tokens in await asyncio.gather(first, waiting, last)] == [4, 24, 8]


async def test_a_queue_is_bounded_in_tokens_too(start_held, eventually):
    daemon, held = await start_held(max_num_seqs=1, max_queued_tokens=1000)
    async with Client(daemon.address) as client:
        first = asyncio.create_task(outcome(client))

        async def has_begun():
            return held.engine.stats().num_running == 1

        await eventually(has_begun)
        long = asyncio.create_task(outcome(client, prompt="a" * 900))

        async def waits():
            return held.engine.stats().num_waiting == 1

        await eventually(waits)
        assert isinstance(await outcome(client, prompt="a" * 200), QueueFullError)
        short = asyncio.create_task(outcome(client, prompt="a" * 50))
        held.may_run.set()
        assert all(len(tokens) == 4 for tokens in await asyncio.gather(first, long, short))


async def test_tenants_get_equal_shares_whoever_came_first(start_held, eventually, tmp_path):
    """One tenant queues twenty requests, then another one: it does not wait for all of them."""
    path = tmp_path / "tenants.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("many", "one")}
    path.write_text(
        "\n".join(f'[tenants.{name}]\ntoken_sha256 = ["{value}"]' for name, value in digests.items())
    )
    daemon, held = await start_held({"tenants": str(path)}, max_num_seqs=1, queue_order="fair_share")

    async with Client(daemon.address, token="many") as many, Client(daemon.address, token="one") as one:
        tasks = [asyncio.create_task(outcome(many, prompt="a" * 40)) for _ in range(20)]

        async def are_queued():
            return held.engine.stats().num_live_requests == len(tasks)

        await eventually(are_queued)
        tasks.append(asyncio.create_task(outcome(one, prompt="b" * 40)))
        await eventually(are_queued)
        held.may_run.set()
        await asyncio.gather(*tasks)
    (theirs,) = held.engine.engine.encode("b")[-1:]
    places = [place for place, tokens in enumerate(held.prefills) if theirs in tokens]
    assert len(places) == 1
    assert places[0] < 3


async def test_a_flood_of_refusals_leaves_memory_flat(start_held, open_raw, framed, eventually):
    daemon, held = await start_held(max_num_seqs=1, max_queued_requests=1)
    connection = await open_raw(address=daemon.address)
    request = framed(pb.GenerateRequest(text="a" * 1000))
    occupying = []
    for count in ("num_running", "num_waiting"):
        occupying.append(connection.request(GENERATE, request))
        await connection.flush()

        async def is_there(count=count):
            return getattr(held.engine.stats(), count) == 1

        await eventually(is_there)
    process = psutil.Process(os.getpid())

    async def flood(count):
        for _ in range(count):
            stream_ids = [connection.request(GENERATE, request) for _ in range(20)]
            await connection.flush()
            for stream_id in stream_ids:
                assert (await connection.status(stream_id))[0] == 8
            connection.events.clear()
        gc.collect()
        return process.memory_info().rss

    before = await flood(30)
    assert await flood(100) - before < 4 * 2**20
    held.may_run.set()
    for stream_id in occupying:
        await connection.status(stream_id)
    await connection.close()


async def test_a_request_of_more_samples_than_may_ever_run_is_the_clients_fault(start_held):
    daemon, _ = await start_held(max_num_seqs=4)
    async with Client(daemon.address) as client:
        with pytest.raises(InvalidRequestError, match="n is 5"):
            await outcome(client, SamplingParams(n=5))
