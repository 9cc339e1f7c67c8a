"""After any mix of clients everything is back where it began.

`make soak` runs it for half an hour: SOAK_SECONDS says how long.
"""

import asyncio
import gc
import logging
import os
import urllib.request

import psutil
import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams

pytestmark = pytest.mark.asyncio

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
ZERO = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_paused",
    "num_live_requests",
    "kv_cache_usage_perc",
    "calls_in_flight",
)
MEMORY_BYTES = 24 * 2**20


@pytest.mark.timeout(SECONDS * 2 + 120)
async def test_everything_is_back_at_the_end(
    start_daemon, make_real_engine, open_raw, framed, run_soak, eventually, caplog
):
    caplog.set_level(logging.ERROR)  # pytest would keep each warning to the end of the test
    engine = make_real_engine(
        max_pending_tokens=64, max_num_seqs=16, max_num_batched_tokens=256, max_queued_requests=32
    )
    limits = {"stall_timeout": 2.0, "request_timeout": 2.0, "connections_per_second": 1000.0}
    daemon = await start_daemon(engine, metrics_port=0, **limits)
    constant = await open_raw(address=daemon.address)
    answering = asyncio.create_task(constant.answer())  # else it would be taken for gone
    process = psutil.Process(os.getpid())

    async def settled():
        async def is_idle():
            return engine.stats().num_live_requests == 0 and daemon.daemon._server.num_connections == 1

        await eventually(is_idle, seconds=30.0)
        await asyncio.sleep(0.1)  # closed connections leave the loop
        gc.collect()
        counts = len(asyncio.all_tasks()), process.num_fds(), process.num_threads()
        memory = process.memory_info()
        return counts, memory.rss - memory.shared  # pages of files come and go as the kernel likes

    (protocol,) = daemon.daemon._server._connections
    window = protocol.connection.h2._inbound_flow_control_window_manager
    await run_soak(daemon.address, 1, min(SECONDS / 4, 60.0))  # what is first used is kept
    before, memory = await settled()
    for place in range(50):
        constant.request("/pykv.v1.Engine/Generate", framed(b"\xff" * 1000))
        await constant.flush()
        if place == 25:
            assert all((await run_soak(daemon.address, 2, SECONDS)).values())
    answering.cancel()
    await constant.close()
    constant = await open_raw(address=daemon.address)
    answering = asyncio.create_task(constant.answer())
    after, memory_after = await settled()
    assert after == before
    assert memory_after - memory < MEMORY_BYTES
    stats = engine.stats()
    assert stats.num_pauses > 0
    assert stats.blocks_active == stats.num_running == stats.num_waiting == stats.tokens_held == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.engine.steps.check()
    metrics = await asyncio.to_thread(scrape, daemon.daemon.metrics_address)
    for name in ZERO:
        assert metrics[f"pykv:{name}"] == 0
    assert metrics["pykv:connections"] == daemon.daemon._server._peers._num_open == 1
    # the window is given back in parts: what is noted of it counts
    num_noted = window._bytes_processed + protocol.connection._num_to_give_back
    assert window.current_window_size + num_noted == window.max_window_size
    async with Client(daemon.address) as client:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert [delta async for delta in client.generate("still there", params)][-1].usage.output_tokens == 3
        assert await client.health() == "SERVING"
    answering.cancel()
    await constant.close()


def scrape(address):
    """The samples that have no other label than the model's."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines}
