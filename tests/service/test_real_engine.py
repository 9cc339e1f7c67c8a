"""The daemon with the real engine and a small random model."""

import asyncio
import gc
import os
import threading
import time

import psutil
import pytest
from timing import assert_below

from pykv.client import Client, ServiceError
from pykv.engine.outputs import RequestOutput
from pykv.errors import CapacityError, EngineDeadError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT = 3
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)


async def test_five_megabytes_of_text_stall_no_stream_and_no_health(start_daemon, make_real_engine, idle):
    engine = make_real_engine()
    daemon = await start_daemon(engine)
    async with Client(daemon.address) as client, Client(daemon.address) as other:

        async def longest_gap():
            gaps = []
            refusing = asyncio.create_task(anext(other.generate("a" * 5_000_000, GREEDY)))
            while not refusing.done() or len(gaps) < 20:
                start = time.perf_counter()
                await anext(running)
                assert await client.health() == "SERVING"
                gaps.append(time.perf_counter() - start)
            with pytest.raises(CapacityError, match="prompt has 5000000 characters"):
                await refusing
            return max(gaps)

        running = client.generate("hello", LONG)
        await anext(running)
        await assert_below(2.0, longest_gap)
        await running.aclose()
    await idle(engine)


def joined(deltas, n=1):
    """What the deltas are together."""
    from pykv.engine.outputs import Completion

    output = RequestOutput("", [], [Completion(index) for index in range(n)])
    for delta in deltas:
        output.add(delta)
    return output


def flat(logprobs):
    """All log probabilities in a row; they differ in their last bits with the batch."""
    known = [entry for entry in logprobs or () if entry is not None]
    return [value for entry in known for value in (entry.logprob, *entry.top_logprobs)]


@pytest.fixture
def idle(eventually):
    """Waits until no request runs; a request that was left ends with the step in flight."""

    async def wait(engine):
        async def is_idle():
            return engine.stats().num_live_requests == 0

        await eventually(is_idle)
        return engine.stats()

    return wait


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=24, seed=7, n=3),
        SamplingParams(max_tokens=24, seed=7, stop=("a", "e"), logprobs=2, prompt_logprobs=1),
    ],
    ids=["greedy", "three samples", "stop texts and logprobs"],
)
async def test_the_stream_joined_is_what_the_engine_generates(real, tiny_runner, collect, params):
    from pykv.engine import Engine

    prompts = ["hello", "삼겹살🙂", "a" * 100]
    expected = Engine.from_runner(*tiny_runner).generate(prompts, params)
    async with Client(real.address) as client:
        streams = [collect(client.generate(prompt, params)) for prompt in prompts]
        found = [joined(deltas, params.n) for deltas in await asyncio.gather(*streams)]
    for one, other in zip(found, expected, strict=True):
        assert [
            (each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in one.outputs
        ] == [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in other.outputs]
        for each, its_like in zip(one.outputs, other.outputs, strict=True):
            assert flat(each.logprobs) == pytest.approx(flat(its_like.logprobs), abs=1e-4)
        assert flat(one.prompt_logprobs) == pytest.approx(flat(other.prompt_logprobs), abs=1e-4)


async def test_a_chat_is_put_through_the_template(real, collect):
    async with Client(real.address) as client:
        deltas = await collect(client.chat([{"role": "user", "content": "hi"}], GREEDY))
        # <s><|user|>hi<|end|><|assistant|>, the text in single bytes
        assert deltas[-1].usage.prompt_tokens == 6


async def test_usage_tells_what_came_from_the_cache(real, collect):
    async with Client(real.address) as client:
        first = await collect(client.generate("a" * 64, GREEDY))
        second = await collect(client.generate("a" * 64, GREEDY))
        other = await collect(client.generate("a" * 64, GREEDY, cache_salt=b"other"))
    assert [deltas[-1].usage.cached_tokens for deltas in (first, second, other)] == [0, 48, 0]


async def test_the_model_and_the_counts_are_told(real):
    async with Client(real.address) as client:
        counts = await client.get_stats()
    assert (counts["blocks_total"], counts["blocks_free"]) == (512, 512)
    assert counts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


async def test_a_bad_request_is_refused_by_field_and_others_go_on(
    real, open_raw, framed, collect, bad_request
):
    request, field = bad_request
    async with Client(real.address) as client:
        undisturbed = await collect(client.generate("other", GREEDY))
        other = asyncio.create_task(collect(client.generate("other", GREEDY)))
        connection = await open_raw(address=real.address)
        stream_id = await connection.send(GENERATE, framed(request))
        status, message = await connection.status(stream_id)
        assert (status, field in message) == (INVALID_ARGUMENT, True)
        assert joined(await other).outputs == joined(undisturbed).outputs
        assert await client.health() == "SERVING"
    await connection.close()


async def test_a_prompt_of_5_mb_is_refused_and_nobody_waits_for_it(real):
    async def refused():
        with pytest.raises(CapacityError):
            await anext(client.generate("a " * 2_500_000))

    async def longest_gap():
        gaps = []
        huge = asyncio.create_task(refused())
        while not huge.done():
            start = time.thread_time()  # of the loop's own work: other processes may be busy
            assert await client.health() == "SERVING"
            gaps.append(time.thread_time() - start)
        await huge
        return max(gaps)

    async with Client(real.address) as client:
        other = client.generate("other", LONG)
        await anext(other)
        await assert_below(0.2, longest_gap)
        await other.aclose()


@pytest.mark.parametrize(
    "text", ["a" * 2_000_000, "\U0001f9ff" * 100_000], ids=["by its length", "after a part was encoded"]
)
async def test_a_refused_text_is_let_go_at_once(real, text):
    """Else many of them wait for the next collection of garbage."""
    async with Client(real.address) as client:
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(CapacityError):
                await anext(client.generate(text, GREEDY))
            assert await client.health() == "SERVING"  # the call's task has ended
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kept = [each for each in gc.garbage if isinstance(each, CapacityError)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not kept


async def kill(address, open_raw, framed, place):
    """Begins a request and leaves it: by reset, close or cancellation, at one of several moments."""
    prompt = [1 + place % 200] * (1 + 17 * (place % 20))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(max_tokens=3000, ignore_eos=True)
    )
    if place % 3 == 2:
        async with Client(address) as client:
            stream = client.generate(prompt, LONG)
            for _ in range(place % 4):
                await anext(stream)
            await stream.aclose()
        return
    connection = await open_raw(address=address)
    stream_id = connection.request(GENERATE, framed(request))
    await connection.flush()
    for _ in range(place % 4):
        await connection._read()
    if place % 3 == 0:
        connection.h2.reset_stream(stream_id)
        await connection.flush()
        await connection.close()
    else:
        connection.abort()


@pytest.mark.parametrize("num_clients", [200, pytest.param(2000, marks=pytest.mark.long)])
async def test_killed_clients_leave_blocks_memory_and_files_where_they_were(
    start_daemon, make_real_engine, open_raw, framed, idle, num_clients
):
    daemon = await start_daemon(
        make_real_engine(enable_prefix_caching=False, max_num_seqs=16, max_num_batched_tokens=64),
        connections_per_second=1e6,
    )

    async def kill_all(places):
        for start in range(0, len(places), 8):
            group = places[start : start + 8]
            await asyncio.gather(*(kill(daemon.address, open_raw, framed, place) for place in group))
        stats = await idle(daemon.engine)
        await asyncio.sleep(0.05)  # closed connections leave the loop
        gc.collect()
        return stats

    process = psutil.Process(os.getpid())
    await kill_all(range(num_clients))  # pages and what is kept for reuse are taken when first needed
    memory, files, tasks = process.memory_info().rss, process.num_fds(), len(asyncio.all_tasks())
    stats = await kill_all(range(num_clients))
    assert (stats.blocks_free, stats.blocks_active, stats.num_live_requests) == (512, 0, 0)
    assert stats.num_running == stats.num_waiting == 0
    assert process.num_fds() == files
    assert len(asyncio.all_tasks()) == tasks
    assert process.memory_info().rss - memory < 8 * 2**20
    assert daemon.daemon._server.num_connections == 0
    async with Client(daemon.address) as client:
        assert len([delta async for delta in client.generate("still there", GREEDY)]) > 0


async def test_abort_ends_the_stream_with_its_reason_and_frees_its_blocks(real, idle):
    async with Client(real.address) as client:
        stream = client.generate("hello", LONG, request_id="mine")
        await anext(stream)
        assert await client.abort("mine")
        last = [delta async for delta in stream][-1]
        assert (last.finish_reason, last.usage is None) == ("abort", False)
        assert not await client.abort("mine")
    assert (await idle(real.engine)).blocks_active == 0


async def test_a_name_can_be_used_again_at_once_and_a_late_abort_kills_no_other(real, collect, idle):
    async with Client(real.address) as client:
        for _ in range(50):
            first = client.generate("hello", LONG, request_id="x")
            await anext(first)
            assert await client.abort("x")
            second = await collect(client.generate("hello", SamplingParams(max_tokens=3), request_id="x"))
            assert second[-1].usage.output_tokens <= 3
            assert second[-1].finish_reason in ("length", "stop")
            assert [delta async for delta in first][-1].finish_reason == "abort"
    assert (await idle(real.engine)).blocks_active == 0


async def test_an_engine_that_dies_ends_its_calls_and_readiness(real, monkeypatch, eventually):
    async with Client(real.address) as client:
        stream = client.generate("hello", LONG)
        await anext(stream)
        monkeypatch.setattr(real.engine.engine.steps, "step", _fail)
        with pytest.raises(EngineDeadError):
            [delta async for delta in stream]

        async def is_not_serving():
            return await client.health() == "NOT_SERVING"

        await eventually(is_not_serving, seconds=2.0)
        assert await client.health("") == "NOT_SERVING"


def _fail():
    raise SystemError("planted")


async def test_a_panic_of_the_core_ends_the_calls_and_readiness(real, monkeypatch, eventually):
    async with Client(real.address) as client:
        stream = client.generate("hello", LONG)
        await anext(stream)
        start = time.monotonic()
        scheduler = real.engine.engine.steps._scheduler
        monkeypatch.setattr(scheduler, "plan", lambda *_: scheduler._native._panic())
        with pytest.raises(EngineDeadError):
            [delta async for delta in stream]

        async def is_not_serving():
            return await client.health() == "NOT_SERVING"

        await eventually(is_not_serving, seconds=2.0)
        assert time.monotonic() - start < 3.0
        with pytest.raises(EngineDeadError):
            await anext(client.generate("hello", GREEDY))


async def test_a_row_that_is_not_finite_fails_its_request_alone(real, tiny_runner, monkeypatch, collect):
    (poison,) = real.engine.engine.encode("Z")[-1:].tolist()
    forward = tiny_runner[0].forward

    def partly_nan(step):
        logits = forward(step)
        logits[step.token_ids[step.logits_indices] == poison] = float("nan")
        return logits

    async with Client(real.address) as client:
        expected = joined(await collect(client.generate("other", GREEDY)))
        monkeypatch.setattr(tiny_runner[0], "forward", partly_nan)
        others = [asyncio.create_task(collect(client.generate("other", GREEDY))) for _ in range(3)]
        with pytest.raises(ServiceError, match="no finite largest logit") as failure:
            await collect(client.generate("helloZ", GREEDY))
        assert failure.value.status == "INTERNAL"
        for deltas in await asyncio.gather(*others):
            assert joined(deltas).outputs == expected.outputs
        assert await client.health() == "SERVING"


async def test_an_engine_that_hangs_is_not_ready_until_it_moves(
    start_daemon, make_real_engine, tiny_runner, monkeypatch, eventually
):
    daemon = await start_daemon(make_real_engine(), progress_timeout=0.3)
    may_go_on, forward = threading.Event(), tiny_runner[0].forward

    def hang(step):
        may_go_on.wait(20)
        return forward(step)

    async with Client(daemon.address) as client:
        monkeypatch.setattr(tiny_runner[0], "forward", hang)
        with pytest.raises(ServiceError, match="no progress") as failure:
            await anext(client.generate("hello", GREEDY))
        assert failure.value.status == "UNAVAILABLE"
        assert await client.health() == "NOT_SERVING"
        may_go_on.set()

        async def is_serving():
            return await client.health() == "SERVING"

        await eventually(is_serving, seconds=5.0)
        assert [delta async for delta in client.generate("hello", GREEDY)]
