"""Long texts keep nobody waiting: not the interpreter, not short texts, not other tenants."""

import asyncio
import contextlib
import gc
import threading
import time
import tracemalloc
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pykv.engine.async_engine import AsyncEngine
from pykv.engine.encoding_threads import MOST_OF_SHORT, MOST_WAITING, EncodingThreads
from pykv.errors import PykvError, QueueFullError
from pykv.sampling import SamplingParams
from pykv.text.tokenizer import TextTokenizer

LONG = MOST_OF_SHORT + 1


@pytest.fixture
def threads(request):
    """They take as much as a test's parameter says."""
    made = EncodingThreads(getattr(request, "param", MOST_WAITING))
    yield made
    made.shut_down()


@pytest.fixture
def blocked(threads):
    """Begins a long text of a tenant "a" that is encoded until the event that is given is set."""

    async def begin():
        has_begun, may_end = threading.Event(), threading.Event()

        def encode():
            has_begun.set()
            assert may_end.wait(20)

        task = asyncio.create_task(threads.run(encode, tenant=b"a", amount=LONG))
        await asyncio.to_thread(has_begun.wait, 20)
        return task, may_end

    return begin


def test_other_threads_run_while_a_long_text_is_encoded():
    backend = Tokenizer(models.BPE(vocab={chr(97 + place): place for place in range(26)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer, text = TextTokenizer(backend), "abc def " * 200_000
    tokenizer.encode("a")
    has_begun, has_ended, num_tokens = threading.Event(), threading.Event(), []

    def encode():
        has_begun.set()
        num_tokens.append(len(tokenizer.encode(text)))
        has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    has_begun.wait(20)
    num_turns = 0
    while not has_ended.is_set():
        num_turns += 1
        time.sleep(0)
    thread.join()
    assert (num_tokens, num_turns > 100) == ([1_200_000], True)


@pytest.mark.asyncio
async def test_a_short_text_does_not_wait_for_a_long_one(threads, blocked):
    task, may_end = await blocked()
    run = threads.run(lambda: 7, tenant=b"a", amount=MOST_OF_SHORT)
    assert await asyncio.wait_for(run, 20) == 7
    may_end.set()
    await task


@pytest.mark.asyncio
async def test_tenants_have_turns_by_characters(threads, blocked):
    task, may_end = await blocked()
    order = []

    def begin(tenant, num_characters):
        encode = partial(order.append, tenant)
        return asyncio.create_task(threads.run(encode, tenant=tenant, amount=num_characters))

    tasks = [begin(b"flood", 4 * LONG) for _ in range(3)] + [begin(b"polite", LONG) for _ in range(5)]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(task, *tasks)
    assert order == [b"polite"] * 3 + [b"flood"] + [b"polite"] * 2 + [b"flood"] * 2
    assert threads._long._line._begins == {}


@pytest.mark.asyncio
async def test_who_left_before_its_turn_is_never_encoded_and_errors_are_its_callers(threads, blocked):
    task, may_end = await blocked()
    encoded = []
    left = asyncio.create_task(threads.run(partial(encoded.append, 1), tenant=b"a", amount=LONG))
    fails = asyncio.create_task(threads.run(partial(int, "x"), tenant=b"a", amount=LONG))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    may_end.set()
    with pytest.raises(ValueError, match="invalid literal"):
        await fails
    await task
    assert (left.cancelled(), encoded) == (True, [])


@pytest.mark.asyncio
async def test_who_left_before_its_turn_has_used_up_nothing(threads, blocked):
    task, may_end = await blocked()
    order = []

    def begin(tenant, amount):
        return asyncio.create_task(threads.run(partial(order.append, tenant), tenant=tenant, amount=amount))

    left = begin(b"b", 100 * LONG)
    tasks = [begin(b"c", 3 * LONG), begin(b"b", 2 * LONG)]
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    may_end.set()
    await asyncio.gather(task, *tasks)
    assert order == [b"b", b"c"]
    assert (threads._long._jobs, len(threads._long._line)) == ({}, 0)


@pytest.mark.asyncio
async def test_ids_have_turns_by_their_number_and_each_message_counts_more_than_its_text(
    make_scripted_engine, monkeypatch
):
    amounts = []
    run = EncodingThreads.run

    def noted(self, function, *, tenant, amount):
        amounts.append(amount)
        return run(self, function, tenant=tenant, amount=amount)

    monkeypatch.setattr(EncodingThreads, "run", noted)
    async with AsyncEngine(make_scripted_engine(lambda history: 65)) as engine:
        for prompt in ("abc", [65] * 5, (65, 66)):
            [_ async for _ in engine.generate(prompt, SamplingParams(max_tokens=1))]
        with contextlib.suppress(PykvError):  # it may have no template
            await anext(engine.chat([{"role": "user", "content": "abc"}] * 2, SamplingParams(max_tokens=1)))
    assert amounts == [3, 5, 2, 2 * (3 + 64)]


@pytest.mark.asyncio
async def test_what_was_taken_is_done_after_the_end_and_nothing_more_is_taken(threads, blocked):
    task, may_end = await blocked()
    waits = asyncio.create_task(threads.run(lambda: 3, tenant=b"b", amount=LONG))
    await asyncio.sleep(0)
    threads.shut_down()
    with pytest.raises(RuntimeError, match="shutdown"):
        await threads.run(lambda: 3, tenant=b"b", amount=LONG)
    may_end.set()
    assert await waits == 3
    await task
    with pytest.raises(RuntimeError, match="shutdown"):
        await threads.run(lambda: 3, tenant=b"b", amount=LONG)
    assert threads._long._jobs == {}


@pytest.mark.asyncio
async def test_where_no_thread_can_be_had_nothing_waits_afterwards(monkeypatch):
    threads = EncodingThreads(most_waiting=1000)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run(lambda: 3, tenant=b"a", amount=400)
    assert threads._short._waiting._in_all == 0
    threads.shut_down()


@pytest.mark.asyncio
async def test_a_stop_iteration_is_an_error_and_not_for_ever(threads):
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await asyncio.wait_for(threads.run(lambda: next(iter(())), tenant=b"a", amount=1), 20)
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.asyncio
async def test_who_left_in_the_middle_leaves_the_thread_to_the_others(threads, blocked):
    task, may_end = await blocked()
    waits = asyncio.create_task(threads.run(lambda: 3, tenant=b"b", amount=LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert await asyncio.wait_for(waits, 20) == 3


@pytest.mark.asyncio
async def test_those_who_left_before_their_turn_leave_no_memory_behind(threads, blocked):
    task, may_end = await blocked()

    async def begin_and_leave(number):
        tasks = [asyncio.create_task(threads.run(int, tenant=b"b", amount=LONG)) for _ in range(number)]
        await asyncio.sleep(0)
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks, each
        await asyncio.sleep(0)  # the loop lets them go

    await begin_and_leave(2000)
    tracemalloc.start()
    try:
        await begin_and_leave(2000)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    may_end.set()
    await task
    assert num_bytes < 2000 * 100


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.asyncio
async def test_a_text_is_let_go_once_it_is_encoded_or_refused(threads, raises):
    """At once: the garbage collector knows nothing of the size of texts."""

    class Text:
        def encode(self):
            if raises:
                raise ValueError

    async def encode():
        text = Text()
        run = threads.run(text.encode, tenant=b"a", amount=1)
        text_is_there = weakref.ref(text)
        del text
        with contextlib.suppress(ValueError):
            await run
        return text_is_there

    gc.disable()
    try:
        text_is_there = await encode()
        await threads.run(int, tenant=b"a", amount=1)  # so the thread is done with the one before
        assert text_is_there() is None
    finally:
        gc.enable()


def is_empty(threads):
    waiting = threads._short._waiting
    return threads._long._waiting is waiting and not waiting._in_all and not waiting._of_tenant


async def begun(threads, tenant, amount, encoded=None):
    """A text that waits, or its refusal."""
    run = threads.run((encoded or []).clear, tenant=tenant, amount=amount)
    task = asyncio.create_task(run)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if task.done():
        await task
    return task


@pytest.mark.parametrize("threads", [8 * LONG], indirect=True)
@pytest.mark.asyncio
async def test_a_tenant_may_have_as_much_waiting_as_is_left_to_all(threads, blocked):
    task, may_end = await blocked()
    refusal = (
        f"this prompt counts as {LONG} characters or token ids, and {4 * LONG} of its tenant wait to be encoded: "
        f"allowed is together at most what is left to all, {4 * LONG} of {8 * LONG}"
    )
    tasks = [await begun(threads, b"a", LONG) for _ in range(4)]
    with pytest.raises(QueueFullError, match=refusal):
        await begun(threads, b"a", LONG)
    tasks += [await begun(threads, b"b", LONG) for _ in range(2)]
    with pytest.raises(QueueFullError):
        await begun(threads, b"b", LONG)
    tasks += [await begun(threads, b"c", LONG)]
    with pytest.raises(QueueFullError):
        await begun(threads, b"d", 2 * LONG)
    tasks[0].cancel()  # what is left leaves room
    await asyncio.gather(tasks[0], return_exceptions=True)
    tasks += [await begun(threads, b"d", 2 * LONG)]
    may_end.set()
    await asyncio.gather(task, *tasks[1:])
    assert is_empty(threads)


@pytest.mark.parametrize("threads", [8 * LONG], indirect=True)
@pytest.mark.asyncio
async def test_any_prompt_may_wait_where_no_other_does_and_one_tenant_more_may(threads, blocked):
    task, may_end = await blocked()
    tasks = [await begun(threads, b"a", 100 * LONG)]
    with pytest.raises(QueueFullError):
        await begun(threads, b"a", 1)
    tasks += [await begun(threads, b"b", 100 * LONG)]
    with pytest.raises(QueueFullError):
        await begun(threads, b"c", 1)
    may_end.set()
    await asyncio.gather(task, *tasks)
    assert is_empty(threads)
    await begun(threads, b"a", 100 * LONG)


@pytest.mark.asyncio
async def test_a_prompt_that_may_not_wait_is_never_encoded_and_leaves_its_name_free(make_scripted_engine):
    served = AsyncEngine(make_scripted_engine(lambda history: 65))
    served._encoding = EncodingThreads(2)  # each prompt counts as one
    has_begun, may_end, params = threading.Event(), threading.Event(), SamplingParams(max_tokens=1)

    def encode():
        has_begun.set()
        assert may_end.wait(20)

    async def one(text):
        return [delta async for delta in served.generate(text, params, request_id=text)]

    async with served:
        blocks = asyncio.create_task(served._encoding.run(encode, tenant=b"a", amount=1))
        assert await asyncio.to_thread(has_begun.wait, 20)
        waits = asyncio.create_task(one("waits"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert served._encoding._short._jobs
        with pytest.raises(QueueFullError, match="wait to be encoded"):
            await one("refused")
        with pytest.raises(QueueFullError, match="wait to be encoded"):
            await served.pin("refused")
        assert served.stats().num_requests == 0
        may_end.set()
        await blocks
        for deltas in (await waits, await one("refused")):
            assert deltas[-1].usage.output_tokens == 1


@pytest.mark.asyncio
async def test_a_text_is_let_go_once_its_request_waits_for_its_first_token(make_scripted_engine):
    engine = make_scripted_engine(lambda history: 65)
    gate = engine.steps._runner.gate

    class Text(str):
        pass

    async with AsyncEngine(engine) as served:
        gate.close()
        text = Text("abc")
        text_is_there, stream = weakref.ref(text), served.generate(text, SamplingParams(max_tokens=1))
        del text
        reader = asyncio.create_task(anext(stream))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        gc.collect()
        assert text_is_there() is None
        gate.open.set()
        assert (await reader).token_ids == (65,)
