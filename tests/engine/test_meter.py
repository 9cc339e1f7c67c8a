"""A stream's meter is told of each token that is made, read or not, and of the request's end, once."""

from __future__ import annotations

import asyncio

import pytest

from pykv.engine.async_engine import AsyncEngine
from pykv.errors import EngineDeadError, InvalidRequestError
from pykv.sampling import SamplingParams

pytestmark = pytest.mark.asyncio

ENDLESS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=400, n=2)


class Notes:
    """What a meter was told, and whether its request has ended."""

    def __init__(self):
        self.prompts, self.tokens, self.num_ends = [], [], 0
        self.has_ended = asyncio.Event()

    def begin(self, num_prompt_tokens):
        self.prompts.append(num_prompt_tokens)

    def count(self, num_tokens):
        assert not self.has_ended.is_set()
        self.tokens.append(num_tokens)

    def end(self):
        self.num_ends += 1
        self.has_ended.set()

    async def at_end(self):
        """The prompt, the sum of the tokens and how often it ended."""
        async with asyncio.timeout(20):
            await self.has_ended.wait()
        await asyncio.sleep(0)
        return self.prompts, sum(self.tokens), self.num_ends


@pytest.fixture
def runner(make_scripted_engine):
    """Of an engine that says the letter A; `runner.served` serves it."""
    engine = make_scripted_engine(lambda history: 65, num_blocks=200)
    runner = engine.steps._runner
    runner.served = AsyncEngine(engine)
    return runner


def begin(served, params=ENDLESS):
    stream, notes = served.generate([1, 2, 3], params), Notes()
    stream.meter = notes
    return stream, notes


async def test_what_is_read_is_measured_once(runner):
    async with runner.served as served:
        stream, notes = begin(served, SamplingParams(max_tokens=7, n=3, ignore_eos=True, temperature=0))
        deltas = [delta async for delta in stream]
        assert await notes.at_end() == ([3], deltas[-1].usage.output_tokens, 1)
        assert sum(notes.tokens) == 21


@pytest.mark.parametrize("how", ["close", "cancel", "drop"])
async def test_the_step_that_runs_when_a_stream_is_left_is_measured(runner, how):
    async with runner.served as served:
        stream, notes = begin(served)
        first = await anext(stream)
        runner.gate.close()
        assert await asyncio.to_thread(runner.gate.entered.wait, 20)
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            reader = asyncio.create_task(_read(stream))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            del stream
        assert not notes.has_ended.is_set()
        runner.gate.open.set()
        prompts, num_tokens, num_ends = await notes.at_end()
        assert (prompts, num_ends) == ([3], 1)
        assert num_tokens == served.stats().num_output_tokens == served.timing().num_new_tokens
        assert num_tokens >= len(first.token_ids) + 2
        assert served.stats().num_live_requests == 0


async def _read(stream):
    async for _ in stream:
        pass


async def test_an_abort_a_death_and_a_closing_end_it(runner):
    served = runner.served
    async with served:
        stream, notes = begin(served)
        await anext(stream)
        await served.abort(next(iter(served._live)))
        await notes.at_end()
        assert sum(notes.tokens) == served.stats().num_output_tokens
        left, of_left = begin(served)
        await anext(left)
        read, of_read = begin(served)
        await anext(read)
        await left.aclose()
        runner.broken = ZeroDivisionError()
        with pytest.raises(EngineDeadError):
            await _read(read)
        for each in (of_left, of_read):
            assert (await each.at_end())[2] == 1
        assert sum(sum(each.tokens) for each in (notes, of_left, of_read)) == served.timing().num_new_tokens


async def test_a_closing_tells_it_the_last_tokens(runner):
    async with runner.served as served:
        stream, notes = begin(served)
        await anext(stream)
    assert await notes.at_end() == ([3], served.timing().num_new_tokens, 1)


async def test_a_refused_request_is_not_measured(runner):
    async with runner.served as served:
        stream, notes = begin(served, SamplingParams(max_tokens=7, stop_token_ids=(10**6,)))
        with pytest.raises(InvalidRequestError):
            await anext(stream)
    assert (notes.prompts, notes.tokens, notes.num_ends) == ([], [], 0)
