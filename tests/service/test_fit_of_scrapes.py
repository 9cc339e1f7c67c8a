"""The metrics of a daemon that serves are what `pykv fit` makes a cost model of."""

import asyncio
import urllib.request

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.simulator.scraped import fit_scrapes

pytestmark = pytest.mark.asyncio


async def test_scrapes_of_a_daemon_give_a_cost_model(start_daemon, make_real_engine, tmp_path):
    daemon = await start_daemon(make_real_engine(), metrics_port=0)
    url = f"http://{daemon.daemon.metrics_address}/metrics"
    paths = []

    def scrape(place):
        with urllib.request.urlopen(url, timeout=20) as reply:
            paths.append(tmp_path / f"{place}.prom")
            paths[-1].write_bytes(reply.read())

    async def ask(client, place, number):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        async for _ in client.generate(f"{place} {number} " * (1 + number), params):
            pass

    async with Client(daemon.address) as client:
        for place in range(12):
            await asyncio.gather(*(ask(client, place, number) for number in range(1 + place % 4)))
            await asyncio.to_thread(scrape, place)
    found = fit_scrapes(paths)
    assert found.num_intervals == 11
    model = found.cost_model
    assert model.fixed + model.per_sequence + model.per_token + model.per_context_token > 0
    least, most = found.step_seconds
    assert 0 < least <= most
