"""A stream that is left while another task waits for it ends for that task too, and its request is given up once."""

from __future__ import annotations

import asyncio

import pytest

from pykv.engine.delta_stream import Channel, DeltaStream


async def next_or_none(stream: DeltaStream) -> object:
    return await anext(stream, None)


async def until_waiting() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_waiting_reader_gets_the_end_when_another_task_closes_the_stream() -> None:
    channel = Channel("a", asyncio.get_running_loop(), 10)
    left: list[Channel] = []

    async def opened() -> Channel:
        return channel

    stream = DeltaStream(opened, left.append)
    reader = asyncio.create_task(next_or_none(stream))
    await until_waiting()
    await stream.aclose()
    assert await asyncio.wait_for(reader, 10) is None
    assert left == [channel]


@pytest.mark.asyncio
async def test_a_stream_that_is_closed_while_it_opens_gives_its_request_up() -> None:
    channel = Channel("a", asyncio.get_running_loop(), 10)
    left: list[Channel] = []
    may_open = asyncio.Event()

    async def opened() -> Channel:
        await may_open.wait()
        return channel

    stream = DeltaStream(opened, left.append)
    reader = asyncio.create_task(next_or_none(stream))
    await until_waiting()
    await stream.aclose()
    may_open.set()
    assert await asyncio.wait_for(reader, 10) is None
    assert left == [channel]
