"""A preempted stream shows as a gap, and its usage says how long."""

import asyncio
import time

import pytest

from pykv.client import Client
from pykv.sampling import SamplingParams

pytestmark = pytest.mark.asyncio

SLOW_STEP_SECONDS = 0.004
GREEDY = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)


@pytest.fixture
def crowded(start_daemon, make_small_engine, monkeypatch):
    """A daemon whose cache holds less than what its requests will need, with a model that takes its time."""

    async def start(**options):
        engine = make_small_engine(num_blocks=13, admission="watermark", watermark=0.0, **options)
        runner = engine.engine.steps._runner
        forward = runner.forward

        def slow(step):
            time.sleep(SLOW_STEP_SECONDS)
            return forward(step)

        monkeypatch.setattr(runner, "forward", slow)
        return await start_daemon(engine, metrics_port=0)

    return start


async def timed(stream):
    """The deltas, and the longest time between two of them in milliseconds."""
    deltas, longest, before = [], 0.0, None
    async for delta in stream:
        now = time.monotonic()
        longest = max(longest, 0.0 if before is None else now - before)
        before = now
        deltas.append(delta)
    return deltas, longest * 1000


MODES = {"recompute": {}, "swap": {"preemption": "swap", "swap_space_bytes": 2**20}}


@pytest.mark.parametrize("mode", MODES)
async def test_the_longest_gap_that_a_client_saw_is_what_its_usage_says(crowded, mode):
    daemon = await crowded(**MODES[mode])
    async with Client(daemon.address) as client:
        results = await asyncio.gather(
            *(timed(client.generate(prompt, GREEDY)) for prompt in ("a" * 40, "b" * 40))
        )
    (stalled, gap), (undisturbed, _) = sorted(results, key=lambda result: -result[0][-1].usage.preemptions)
    usage = stalled[-1].usage
    assert usage.preemptions == 1
    assert (usage.recomputed_tokens > 0, usage.swapped_blocks > 0) == (mode == "recompute", mode == "swap")
    assert usage.stalled_ms == pytest.approx(gap, rel=0.2, abs=30)
    assert usage.stalled_ms > 20 * SLOW_STEP_SECONDS * 1000
    assert (undisturbed[-1].usage.preemptions, undisturbed[-1].usage.stalled_ms) == (0, 0.0)
    timing = daemon.engine.timing()
    stalls = {"recompute": timing.stalls_recompute, "swap": timing.stalls_swap}
    assert {name: counts.num_values for name, counts in stalls.items()} == {
        name: int(name == mode) for name in MODES
    }
    assert stalls[mode].total * 1000 == pytest.approx(usage.stalled_ms)


@pytest.mark.parametrize("mode", MODES)
async def test_a_preempted_stream_has_each_token_once_and_in_order(crowded, make_small_engine, mode):
    prompts = ["a" * 40, "b" * 40, "c" * 40]
    alone = make_small_engine(num_blocks=65).engine.generate(prompts, GREEDY)
    daemon = await crowded(**MODES[mode])
    async with Client(daemon.address) as client:
        results = await asyncio.gather(*(timed(client.generate(prompt, GREEDY)) for prompt in prompts))
    assert sum(deltas[-1].usage.preemptions for deltas, _ in results) > 0
    for (deltas, _), expected in zip(results, alone, strict=True):
        assert [token for delta in deltas for token in delta.token_ids] == expected.outputs[0].token_ids
        assert "".join(delta.text for delta in deltas) == expected.outputs[0].text
