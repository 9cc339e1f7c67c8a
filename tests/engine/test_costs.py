"""What preemption "auto" chooses by: the cost of a prompt's token, and of a block's copy."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from pykv.engine.costs import PrefillMeter, seconds_per_block
from pykv.sampling import SamplingParams


class CountingRunner:
    """Copies nothing; remembers what it was asked for."""

    device = torch.device("cpu")
    block_size, kv_bytes_per_token = 16, 64
    num_blocks, num_host_blocks = 20, 9

    def __init__(self):
        self.calls = []

    def swap_out(self, pairs):
        self.calls.append(("out", pairs.tolist()))

    def swap_in(self, pairs):
        self.calls.append(("in", pairs.tolist()))


def test_a_blocks_cost_is_that_of_one_copy_without_the_first_use():
    times = itertools.accumulate(
        [0.0, 50.0, 0.0, 50.0, 0.0, 8.0, 0.0, 24.0, 0.0, 8.0, 0.0, 8.0] + [0.0, 90.0] * 2
    )
    runner = CountingRunner()
    assert seconds_per_block(runner, lambda: next(times)) == (8 + 8) / (2 * 8)
    assert [name for name, _ in runner.calls[:2]] == ["in", "out"]
    assert {str(pairs) for _, pairs in runner.calls} == {str([[block, block] for block in range(1, 9)])}


def test_a_prompts_cost_is_measured_in_steps_of_prompts():
    meter = PrefillMeter()
    assert not meter.add(num_tokens=8, num_decodes=0, seconds=1.0)
    assert not meter.add(num_tokens=64, num_decodes=33, seconds=1.0)
    assert meter.seconds_per_token == 0.0
    assert meter.add(num_tokens=64, num_decodes=32, seconds=0.64)
    assert meter.seconds_per_token == 0.01
    assert meter.add(num_tokens=2048, num_decodes=0, seconds=2048 * 0.03)
    assert meter.seconds_per_token == pytest.approx(0.02)
    assert meter.add(num_tokens=10_000, num_decodes=0, seconds=100.0)
    assert meter.seconds_per_token == pytest.approx(0.01)


def test_auto_swaps_where_copying_is_cheaper_than_computing(make_toy_engine):
    """The first step tells what computing costs; a prompt's token costs more than its share of a block's copy."""
    engine = make_toy_engine(
        num_blocks=9, num_host_blocks=32, swap_space_bytes=1, admission="watermark", watermark=0.0
    )
    assert engine.steps._seconds_per_block > 0
    engine.steps._seconds_per_block = 0.0
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[index] * 30 for index in range(4)]
    engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swapped_in_blocks > 0
    assert stats.recomputed_tokens == 0


def test_a_steps_copies_are_made_in_their_order(make_toy_engine):
    """A block that is swapped out may be filled from the host, and then copied, in the same step."""

    class Pairs:
        def __getattr__(self, name):
            return lambda plan: name

    steps = make_toy_engine().steps
    calls = []
    for name in ("swap_out", "swap_in", "copy_blocks"):
        setattr(steps._runner, name, lambda pairs, name=name: calls.append((name, pairs)))
    plan = SimpleNamespace(num_swap_outs=1, num_swap_ins=1, num_copies=1)
    steps._copy_blocks(plan, Pairs())
    assert calls == [("swap_out", "swap_outs"), ("swap_in", "swap_ins"), ("copy_blocks", "copies")]
