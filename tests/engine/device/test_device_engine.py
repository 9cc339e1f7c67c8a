"""The engine that goes through streams, late arrays and recordings says what the plain one says."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pykv
from pykv.engine.device.device_runner import DeviceRunner
from pykv.engine.device.host import HostDevice, RepeatedWork
from pykv.engine.runner import ModelRunner
from pykv.kv_pool import KvPool
from pykv.models.step_context import StepContext

PREFIX = [7 * position % 251 for position in range(40)]
PROMPTS = [[*PREFIX, number, 3, number + 1] for number in range(6)] + [[5, 9], [8, 1, 4]]
PARAMS = pykv.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = pykv.SamplingParams(temperature=0.9, top_k=20, seed=3, max_tokens=12, n=2, ignore_eos=True)


class CountingDevice(HostDevice):
    """Counts what is recorded and replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings: list[RepeatedWork] = []
        self.num_replays = 0

    def record(self, work):
        recording = super().record(work)
        replay = recording.replay

        def counted() -> None:
            self.num_replays += 1
            recording.output.fill_(torch.nan)  # what an earlier replay left is not the result
            replay()

        recording.replay = counted
        self.recordings.append(recording)
        return recording


def generate(
    model,
    device=None,
    *,
    num_blocks=64,
    num_host_blocks=0,
    params=PARAMS,
    uses_graphs=True,
    budget=48,
    **options,
):
    pool = KvPool(model.layout, num_blocks, 8, model.dtype)
    swap = KvPool(model.layout, num_host_blocks, 8, model.dtype) if num_host_blocks else None
    if device is None:
        runner = ModelRunner(model, pool, "auto", swap)
    else:
        runner = DeviceRunner(model, pool, "auto", swap, device=device, uses_graphs=uses_graphs)
    config = pykv.EngineConfig(max_num_seqs=5, max_num_batched_tokens=budget, **options)
    with pykv.Engine.from_runner(runner, None, config) as engine:
        outputs = engine.generate(PROMPTS, params)
        stats = engine.stats()
        engine.steps.check()
    return [[sample.token_ids for sample in output.outputs] for output in outputs], stats


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_plain_engine_and_decodes_are_replayed(tiny_model, params) -> None:
    device = CountingDevice()
    assert generate(tiny_model, device, params=params)[0] == generate(tiny_model, params=params)[0]
    assert len(device.recordings) == 7  # batches of 1, 2, 4 and 5, all but the first in two forms
    assert device.num_replays >= 11
    assert len({recording.output.data_ptr() for recording in device.recordings}) == 1  # no room for each


def test_tokens_are_those_of_the_plain_engine_where_sequences_are_swapped(tiny_model) -> None:
    options = {"num_blocks": 13, "num_host_blocks": 40, "preemption": "swap", "swap_space_bytes": 1}
    options |= {"admission": "watermark", "watermark": 0.0}
    plain, stats = generate(tiny_model, **options)
    assert stats.preemptions > 0
    assert generate(tiny_model, HostDevice(), **options)[0] == plain


def test_no_decode_is_larger_than_a_step(tiny_model) -> None:
    device = CountingDevice()
    assert generate(tiny_model, device, budget=3)[0] == generate(tiny_model, budget=3)[0]
    assert [len(recording.output) for recording in device.recordings] == [3, 3, 2, 2, 1]


def test_nothing_is_recorded_where_graphs_are_off(tiny_model) -> None:
    device = CountingDevice()
    assert generate(tiny_model, device, uses_graphs=False)[0] == generate(tiny_model)[0]
    assert not device.recordings


def test_a_model_that_cannot_be_recorded_is_launched_and_the_log_says_why(tiny_model, caplog) -> None:
    class NoRecording(HostDevice):
        def record(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING, "pykv.engine"):
        tokens, _ = generate(tiny_model, NoRecording())
    assert tokens == generate(tiny_model)[0]
    assert "cannot be recorded" in caplog.text
    assert "stream is capturing" in caplog.text


class NoReads(TorchDispatchMode):
    """Refuses what a recording cannot hold: operators by which the host reads a tensor."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in self.READS, f"the host reads a tensor by {name}"
        return func(*args, **(kwargs or {}))


def test_a_decode_reads_nothing_back(tiny_model, monkeypatch) -> None:
    """All but attention, whose GPU kernels have a test of their own."""

    def attend(self, layer, query, key, value, **options):
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    monkeypatch.setattr(StepContext, "attend", attend)
    pool = KvPool(tiny_model.layout, 4, 8, tiny_model.dtype)
    rows = torch.arange(3)
    context = StepContext(pool, rows, rows[:, None].int(), rows.int() + 1, torch.arange(4).int())
    with NoReads():
        logits = tiny_model.forward(rows, rows, rows, context)
    assert logits.shape == (3, 256)
