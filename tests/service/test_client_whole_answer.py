"""An answer that has come whole is read to its end, even if its connection has ended meanwhile."""

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams


@pytest.mark.asyncio
async def test_an_answer_that_came_before_the_daemon_ended_is_read_to_its_end(start_daemon_in, make_engine):
    daemon, stop = await start_daemon_in(make_engine(), drain_timeout=20)
    async with Client(daemon.address) as client:
        stream = client.generate([5], SamplingParams(max_tokens=300))
        num_tokens = len((await anext(stream)).token_ids)
        await stop()  # the connection too
        async for delta in stream:
            num_tokens += len(delta.token_ids)
    assert num_tokens == 300
