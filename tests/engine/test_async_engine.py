"""Streams: whole texts, early leaving of every kind, ids, shutdown and death."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from timing import assert_below

from pykv.engine import engine_thread
from pykv.engine.async_engine import AsyncEngine
from pykv.errors import (
    CapacityError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    StepError,
)
from pykv.sampling import SamplingParams

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100_000)
LONG = 100_000


@pytest_asyncio.fixture
async def endless(make_scripted_engine):
    """Says the letter A until it is stopped."""
    async with AsyncEngine(
        make_scripted_engine(lambda history: 65, max_model_len=4000, num_blocks=5000)
    ) as engine:
        yield engine


@asynccontextmanager
async def serving(engine, **options):
    async with AsyncEngine(engine, **options) as served:
        yield served


async def text_of(stream):
    return "".join([delta.text async for delta in stream])


async def until(condition):
    """Lets the loop run until the condition holds, of which nothing tells."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def is_idle(engine):
    stats = engine.stats()
    return stats.num_live_requests == 0 and stats.blocks_active == 0


async def test_a_stream_gives_the_text_of_generate(make_scripted_engine):
    text = "삼겹살 and a \U0001f642"
    async with serving(make_scripted_engine(text)) as engine:
        deltas = [delta async for delta in engine.generate("\n", GREEDY)]
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish_reason for delta in deltas[-1:]] == ["stop"]
    assert all(delta.finish_reason is None and delta.usage is None for delta in deltas[:-1])
    assert deltas[-1].usage.output_tokens == sum(len(delta.token_ids) for delta in deltas)


async def test_many_streams_get_each_its_own_tokens(make_toy_engine):
    prompts = [[index, 5, index] for index in range(40)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in make_toy_engine().generate(prompts, params)]

    async def collect(prompt):
        return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]

    async with serving(make_toy_engine(num_blocks=30, max_num_seqs=16)) as engine:
        assert await asyncio.gather(*map(collect, prompts)) == expected
        assert is_idle(engine)


@pytest.mark.parametrize("num_blocks", [9, 10, 12, 400])
async def test_a_preempted_stream_says_everything_once(make_scripted_engine, num_blocks):
    text = "삼겹살\U0001f642 and \U0001f468" * 3
    engine = make_scripted_engine(text, num_blocks=num_blocks, admission="watermark", watermark=0.0)
    async with serving(engine) as served:
        texts = await asyncio.gather(*(text_of(served.generate([index, 10], GREEDY)) for index in range(6)))
        assert texts == [text] * 6
        assert (served.stats().preemptions > 0) == (num_blocks < 400)


async def test_all_samples_are_streamed_to_their_ends(make_toy_engine):
    params = SamplingParams(n=4, seed=7, temperature=2.0, max_tokens=30, logit_bias={258: 5.0})
    expected = make_toy_engine().generate([[1, 2, 3]], params)[0]
    tokens, reasons = {index: [] for index in range(4)}, {}
    async with serving(make_toy_engine()) as engine:
        async for delta in engine.generate([1, 2, 3], params):
            assert delta.index not in reasons
            tokens[delta.index] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
        assert delta.usage == expected.usage
    assert list(tokens.values()) == [sample.token_ids for sample in expected.outputs]
    assert len(reasons) == 4


async def test_a_slow_reader_gets_everything_in_few_deltas(make_scripted_engine):
    text = "abc" * 100
    async with serving(make_scripted_engine(text)) as engine:
        stream = engine.generate("\n", SamplingParams(temperature=0, logprobs=0))
        deltas = [await anext(stream)]
        await until(lambda: is_idle(engine))
        deltas += [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas) <= 4
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert deltas[-1].usage.output_tokens == 301


async def test_a_request_whose_reader_is_too_far_behind_is_paused_until_it_has_read(endless):
    endless._max_pending_tokens = 100
    stream = endless.generate("\n", ENDLESS)
    tokens = (await anext(stream)).token_ids
    await until(lambda: endless.stats().num_paused == 1)
    before = endless.stats()
    assert before.blocks_active > 0
    assert before.num_pauses == 1
    assert len(await text_of(endless.generate("\n", SamplingParams(max_tokens=5, ignore_eos=True)))) == 5
    assert endless.timing().num_new_tokens < 2 * 100
    tokens += tuple([token async for delta in stream for token in delta.token_ids])
    assert tokens == (65,) * (endless.engine.max_model_len - 1)
    assert is_idle(endless)


async def test_requests_that_come_together_begin_in_one_step(make_scripted_engine, monkeypatch):
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", 20.0)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4)
    async with serving(make_scripted_engine(lambda history: 65, num_blocks=100)) as engine:
        for num_rounds in (1, 2):
            texts = await asyncio.gather(*(text_of(engine.generate("abc", params)) for _ in range(8)))
            assert texts == ["AAAA"] * 8
            assert engine.stats().num_steps == 4 * num_rounds
        refused = engine.generate("\n" * 10_000, params)
        start = time.monotonic()
        with pytest.raises(CapacityError):
            await text_of(refused)
        assert await text_of(engine.generate("a", params)) == "AAAA"
        assert time.monotonic() - start < 10.0


async def test_a_paused_request_can_be_aborted_and_ends_with_the_engine(endless):
    endless._max_pending_tokens = 100
    streams = [endless.generate("\n", ENDLESS, request_id=str(place)) for place in range(3)]
    for stream in streams:
        await anext(stream)
    await until(lambda: endless.stats().num_paused == 3)
    await until(lambda: endless.last_progress >= time.monotonic() - 0.001)  # idle, so no progress is due
    assert await endless.abort("0")
    assert [delta async for delta in streams[0]][-1].finish_reason == "abort"
    await streams[1].aclose()
    await until(lambda: endless.stats().num_live_requests == 1)
    await endless.aclose()
    assert [delta async for delta in streams[2]][-1].finish_reason == "abort"
    assert is_idle(endless)


async def leave_by_break(stream):
    async for _ in stream:
        break


async def leave_by_aclose(stream):
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_athrow(stream):
    await anext(stream)
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("gone"))


async def leave_by_error(stream):
    async def divide():
        async for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await divide()


async def leave_by_cancel(stream):
    task = asyncio.create_task(text_of(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancel_at_once(stream):
    task = asyncio.create_task(text_of(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(stream):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await text_of(stream)


async def leave_by_dropping(stream):
    await anext(stream)
    cycle = [stream]
    cycle.append(cycle)


LEAVING = [
    leave_by_break,
    leave_by_aclose,
    leave_by_athrow,
    leave_by_error,
    leave_by_cancel,
    leave_by_cancel_at_once,
    leave_by_timeout,
    leave_by_dropping,
]


async def wrapped(stream):
    async for delta in stream:
        yield delta


@pytest.mark.parametrize("wrap", [lambda stream: stream, wrapped], ids=["plain", "wrapped"])
@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
async def test_leaving_early_frees_everything(endless, leave, wrap, caplog):
    await leave(wrap(endless.generate("\n", ENDLESS)))
    gc.collect()
    await until(lambda: is_idle(endless))
    assert not endless._live
    assert not caplog.records
    endless.engine.steps.check()


async def test_blocks_are_free_two_steps_after_leaving(endless):
    runner, stream = endless.engine.runner, endless.generate("\n", ENDLESS)
    await anext(stream)
    runner.gate.close()
    await asyncio.to_thread(runner.gate.entered.wait, 10)
    before = runner.num_steps
    await stream.aclose()
    runner.gate.open.set()
    await until(lambda: is_idle(endless))
    assert runner.num_steps <= before + 2


async def test_two_hundred_early_leavers_leave_nothing(endless):
    free = endless.stats().blocks_free

    async def visit(index):
        stream = endless.generate([65 + index % 20, 10], SamplingParams(max_tokens=1000, n=1 + index % 3))
        await LEAVING[index % len(LEAVING)](stream)

    for begin in range(0, 200, 20):
        await asyncio.gather(*(visit(index) for index in range(begin, begin + 20)))
    gc.collect()
    await until(lambda: is_idle(endless))
    stats = endless.stats()
    assert stats.blocks_free + stats.blocks_cached == free
    assert stats.num_requests > 100
    endless.engine.steps.check()


async def test_others_go_on_when_one_leaves(make_scripted_engine):
    async with serving(make_scripted_engine("abc" * 30)) as engine:
        staying = asyncio.create_task(text_of(engine.generate("\n", GREEDY)))
        await leave_by_break(engine.generate("a\n", GREEDY))
        assert await staying == "abc" * 30


async def test_an_aborted_stream_ends_with_its_reason(endless):
    stream = endless.generate("\n", ENDLESS, request_id="x")
    deltas = [await anext(stream)]
    assert await endless.abort("x")
    assert not await endless.abort("x")
    deltas += [delta async for delta in stream]
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].usage.output_tokens == sum(len(delta.token_ids) for delta in deltas)


async def test_an_unknown_id_cannot_be_aborted(endless):
    assert not await endless.abort("never")


async def test_a_request_can_be_aborted_while_it_is_encoded(endless, monkeypatch):
    new_request = endless.engine.new_request

    def slow(*arguments):
        endless.engine.runner.gate.wait()
        return new_request(*arguments)

    monkeypatch.setattr(endless.engine, "new_request", slow)
    endless.engine.runner.gate.close()
    reading = asyncio.create_task(text_of(endless.generate("\n", ENDLESS, request_id="x")))
    await asyncio.to_thread(endless.engine.runner.gate.entered.wait, 10)
    assert await endless.abort("x")
    endless.engine.runner.gate.open.set()
    await asyncio.wait_for(reading, 20)
    await until(lambda: is_idle(endless))


async def test_a_live_id_is_refused_and_the_first_goes_on(endless):
    first = endless.generate("\n", ENDLESS, request_id="x")
    await anext(first)
    with pytest.raises(DuplicateRequestError, match="x"):
        await anext(endless.generate("\n", ENDLESS, request_id="x"))
    await anext(first)
    await first.aclose()


@pytest.mark.parametrize("end", ["close", "abort", "cancel"])
async def test_an_id_can_be_used_again_in_the_tick_that_ended_it(endless, end):
    for _ in range(200 // 3):
        first = endless.generate("\n", ENDLESS, request_id="x")
        await anext(first)
        if end == "close":
            await first.aclose()
        elif end == "abort":
            assert await endless.abort("x")
        else:
            reading = asyncio.create_task(anext(first))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await first.aclose()
        second = endless.generate("\n", SamplingParams(temperature=0, max_tokens=3), request_id="x")
        assert await text_of(second) == "AAA"
    del first
    await until(lambda: is_idle(endless))


@pytest.mark.parametrize("prompt", ["", [], [-1], [2**40], [1] * 5000])
async def test_a_bad_prompt_is_refused_at_the_first_delta(endless, prompt):
    running = endless.generate("\n", ENDLESS)
    await anext(running)
    stream = endless.generate(prompt, GREEDY, request_id="x")
    with pytest.raises(InvalidRequestError, match="prompt"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await anext(running)
    await running.aclose()
    assert "x" not in endless._live


async def test_a_huge_text_stalls_no_stream(endless):
    async def longest_gap():
        gaps = []
        refusing = asyncio.create_task(anext(endless.generate("a" * 5_000_000, GREEDY)))
        for _ in range(20):
            start = time.perf_counter()
            await anext(running)
            gaps.append(time.perf_counter() - start)
        with pytest.raises(CapacityError):
            await refusing
        return max(gaps)

    running = endless.generate("\n", ENDLESS)
    await anext(running)
    await assert_below(2.0, longest_gap)
    await running.aclose()


async def test_a_full_queue_refuses_before_the_prompt_is_encoded(make_scripted_engine, monkeypatch):
    engine = make_scripted_engine(
        lambda history: 65, max_queued_requests=2, max_num_seqs=1, max_model_len=100
    )
    async with serving(engine) as served:
        engine.runner.gate.close()
        readers = [asyncio.create_task(text_of(served.generate("\n", ENDLESS))) for _ in range(1)]
        await asyncio.to_thread(engine.runner.gate.entered.wait, 10)
        readers += [asyncio.create_task(text_of(served.generate("\n", ENDLESS))) for _ in range(2)]
        await until(lambda: served.stats().num_waiting == 2)
        monkeypatch.setattr(engine, "new_request", None)
        with pytest.raises(QueueFullError, match="2"):
            await anext(served.generate("\n", GREEDY))
        engine.runner.gate.open.set()
        assert await asyncio.gather(*readers) == ["A" * 99] * 3


async def test_a_chat_is_put_through_the_template(make_scripted_engine):
    engine = make_scripted_engine("fine")
    engine.tokenizer._source = FakeSource()
    async with serving(engine) as served:
        deltas = [delta async for delta in served.chat([{"role": "user", "content": "hi"}], GREEDY)]
        assert "".join(delta.text for delta in deltas) == "fine"
        assert deltas[-1].usage.prompt_tokens == len("user: hi\n")
        with pytest.raises(InvalidRequestError, match="messages"):
            await anext(served.chat([], GREEDY))


class FakeSource:
    chat_template = "yes"

    def apply_chat_template(self, messages, **options):
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


async def test_a_failing_request_says_so_and_the_others_go_on(make_scripted_engine):
    engine = make_scripted_engine("abc" * 20)
    engine.runner.raising = {7}
    async with serving(engine) as served:
        good = asyncio.create_task(text_of(served.generate("\n", GREEDY)))
        deltas = [delta async for delta in served.generate([7, 10], GREEDY)]
        assert [delta.finish_reason for delta in deltas] == ["error"]
        assert "too much" in deltas[0].error
        assert await good == "abc" * 20
        assert served.is_alive


async def test_a_broken_model_ends_every_stream_and_refuses_new_ones(endless, caplog):
    streams = [endless.generate("\n", ENDLESS) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    endless.engine.runner.broken = RuntimeError("the device is gone")
    for stream in streams:
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await text_of(stream)
    assert not endless.is_alive
    assert isinstance(endless.error, RuntimeError)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await anext(endless.generate("\n", GREEDY))
    assert [record.name for record in caplog.records] == ["pykv.engine"]


async def test_progress_stands_still_only_while_a_step_hangs(endless):
    runner = endless.engine.runner
    assert time.monotonic() - endless.last_progress < 1.0
    stream = endless.generate("\n", ENDLESS)
    await anext(stream)
    runner.gate.close()
    await asyncio.to_thread(runner.gate.entered.wait, 10)
    stuck = endless.last_progress
    await asyncio.sleep(0.05)
    assert endless.last_progress == stuck
    assert endless.is_alive
    runner.gate.open.set()
    await until(lambda: endless.last_progress > stuck)
    await stream.aclose()


async def test_closing_ends_the_streams_with_abort_and_refuses_new_ones(make_scripted_engine):
    engine = AsyncEngine(make_scripted_engine(lambda history: 65, max_model_len=LONG, num_blocks=8000))
    engine.start()
    stream = engine.generate("\n", ENDLESS)
    await anext(stream)
    await engine.aclose()
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason == "abort"
    assert is_idle(engine)
    assert not engine.is_alive
    assert engine.error is None
    with pytest.raises(EngineDeadError, match="closed"):
        await anext(engine.generate("\n", GREEDY))


async def test_an_engine_is_started_once_and_before_its_use(make_scripted_engine):
    engine = AsyncEngine(make_scripted_engine("abc"))
    with pytest.raises(StepError, match="not started"):
        await anext(engine.generate("\n", GREEDY))
    async with engine:
        with pytest.raises(StepError, match="before"):
            engine.start()


async def test_a_loop_that_was_closed_loses_its_requests_and_no_other(endless):
    def visit():
        async def take_one():
            stream = endless.generate("\n", ENDLESS)
            await anext(stream)
            return stream

        return asyncio.run(take_one())

    stream = await asyncio.to_thread(visit)
    await until(lambda: is_idle(endless))
    del stream
    assert await text_of(endless.generate("\n", SamplingParams(temperature=0, max_tokens=2))) == "AA"


async def test_streams_of_two_loops_run_side_by_side(endless):
    params = SamplingParams(temperature=0, max_tokens=50)

    def other():
        return asyncio.run(text_of(endless.generate("\n", params)))

    texts = await asyncio.gather(asyncio.to_thread(other), text_of(endless.generate("a\n", params)))
    assert texts == ["A" * 50] * 2


async def test_deltas_of_a_step_wake_the_loop_once(endless, monkeypatch):
    loop = asyncio.get_running_loop()
    params = SamplingParams(temperature=0, max_tokens=40)
    wakes, call_soon = [], loop.call_soon_threadsafe

    def counted(callback, *arguments, **options):
        if "_empty" in repr(callback):
            wakes.append(callback)
        return call_soon(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    texts = await asyncio.gather(*(text_of(endless.generate([66, 10], params)) for _ in range(16)))
    assert texts == ["A" * 40] * 16
    assert 0 < len(wakes) <= endless.engine.runner.num_steps
