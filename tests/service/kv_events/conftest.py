"""Engines whose cached blocks are told of, and load for them."""

import asyncio
import random

import pytest

from pykv.sampling import SamplingParams

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.fixture
def start(start_daemon, make_small_engine):
    """Starts a daemon with a small cache: `await start(num_blocks=41, max_kv_events=10_000, **options)`."""

    async def start(num_blocks=41, max_kv_events=10_000, **options):
        engine = make_small_engine(num_blocks=num_blocks, max_kv_events=max_kv_events, watermark=0.0)
        return await start_daemon(engine, max_kv_events=max_kv_events, **options)

    return start


@pytest.fixture
def cached_keys():
    """What the core itself says can be found: `cached_keys(engine)`."""

    def keys(engine):
        return {key.tobytes() for key in engine.snapshot_events().keys}

    return keys


@pytest.fixture
def load():
    """Random prompts, some of which begin alike, some at the same time: `await load(client, count, seed=1)`."""

    async def load(client, count, seed=1):
        choices = random.Random(seed)

        async def one():
            text = chr(97 + choices.randrange(4)) * 32 + str(choices.randrange(8)) * choices.randrange(1, 200)
            return [delta async for delta in client.generate(text, ONE)]

        for _ in range(count // 4):
            await asyncio.gather(*(one() for _ in range(4)))

    return load
