"""The engine's uploads, copies and steps are in an order that suffices on a device which does everything late.

A toy model stores token ids in place of keys and values, so that a block or an array that is read or written at the
wrong time gives another token. Each rule of the order is left out in turn, and must be missed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pykv.engine.device.block_copies import BlockCopies
from pykv.engine.device.host import HostDevice
from pykv.engine.device.step_arrays import DeviceArrays
from pykv.engine.device.views import DeviceStepViews
from pykv.engine.step_tensors import StepTensors
from pykv.scheduler import OUTCOME_OK, Plan, Scheduler, SchedulerConfig

VOCAB = 997
CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=4,
    num_host_blocks=16,
    max_num_seqs=8,
    max_num_batched_tokens=12,
    max_model_len=56,
    preemption="swap",
    admission="watermark",
    watermark=0.0,
    queue_order="priority",
    preempt_lower_ranks=True,
)


@dataclass(eq=False)
class Work:
    run: Callable[[], None]
    after: list[Work]
    is_done: bool = False


class LateEvent:
    def __init__(self, device: LateDevice, work: Work | None) -> None:
        self.device, self.work = device, work

    def synchronize(self) -> None:
        while self.work is not None and not self.work.is_done:
            self.device.do_something()


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.last: Work | None = None
        self.awaited: list[Work] = []

    def run(self, work: Callable[[], None]) -> None:
        before = [*self.awaited, *([self.last] if self.last else [])]
        self.awaited = []
        self.last = Work(work, before)
        self.device.pending.append(self.last)

    def record(self) -> LateEvent:
        return LateEvent(self.device, self.last)

    def wait(self, event: LateEvent) -> None:
        if event.work is not None:
            self.awaited.append(event.work)


class LateDevice(HostDevice):
    """Does what was launched as late as it may, in any order that its streams and waits allow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choices = random.Random(seed)
        self.pending: list[Work] = []
        self.torch_device = torch.device("cpu")
        self.compute = LateStream(self)

    def new_stream(self) -> LateStream:
        return LateStream(self)

    def do_something(self) -> None:
        ready = [work for work in self.pending if all(before.is_done for before in work.after)]
        work = self.choices.choice(ready)
        work.run()
        work.is_done = True
        self.pending.remove(work)


class Deaf(LateStream):
    """A stream that waits for nobody."""

    def wait(self, event: object) -> None:
        return


class Engine:
    """The engine's device parts around the toy model; `broken` is the rule that is left out."""

    def __init__(self, seed: int, broken: str) -> None:
        self.device = LateDevice(seed)
        if broken == "a step waits for its copies":
            self.device.compute = Deaf(self.device)
        arrays = DeviceArrays(self.device, CONFIG)
        self.copies = BlockCopies(self.device)
        if broken == "copies wait for the step before":
            self.copies._stream = Deaf(self.device)
        join = (lambda: None) if broken == "arrays stay until the copies have read them" else self.copies.join
        self.ring = [DeviceStepViews(arrays, CONFIG, (), join) for _ in range(2)]
        if broken == "host arrays stay until they are read":
            for views in self.ring:
                views.wait = lambda: None
        self.cache = torch.zeros(CONFIG.num_blocks, CONFIG.block_size, dtype=torch.int64)
        self.host = torch.zeros(CONFIG.num_host_blocks, CONFIG.block_size, dtype=torch.int64)
        self.num_overlaps = 0

    def launch(self, views: DeviceStepViews, plan: Plan) -> list[int]:
        views.upload(plan)
        lists = ((views.swap_outs, self.cache, self.host), (views.swap_ins, self.host, self.cache),
                 (views.copies, self.cache, self.cache))  # fmt: skip
        for pairs_of, source, target in lists:
            pairs = pairs_of(plan)
            if len(pairs):
                self.copies.run(
                    lambda pairs=pairs, source=source, target=target: self.copy(pairs, source, target)
                )
        step = views.step(plan, views.buffers.sample_indices[: plan.num_samples])
        if step.copies_may_overlap:
            self.num_overlaps += 1
        else:
            self.copies.join()
        samples: list[int] = []
        self.device.compute.run(lambda: samples.extend(self.forward(step)))
        if plan.num_samples:
            self.device.compute.record().synchronize()
        return samples

    @staticmethod
    def copy(pairs: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        for first, second in pairs.tolist():
            target[second] = source[first]

    def forward(self, step: StepTensors) -> list[int]:
        """Writes all that is new, then sums for each token what it sees, weighted by position."""
        self.cache.view(-1)[step.slot_mapping] = step.token_ids
        sums = torch.zeros_like(step.token_ids)
        starts = step.query_starts.tolist()
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            seen = self.cache[step.block_tables[step.table_rows[row]].long()].view(-1)[: step.seq_lens[row]]
            totals = torch.cumsum(seen * (3 * torch.arange(len(seen)) + 1), 0)
            sums[begin:end] = totals[step.positions[begin:end]]
        return (sums[step.logits_indices] % VOCAB).tolist()


def workload(seed: int) -> list[tuple[int, list[int], int, int, int]]:
    """(step, prompt, max_tokens, num_samples, priority) of requests that come while others run."""
    draw = random.Random(seed).randint
    first = (0, list(range(1, 45)), 10, 1, 2)
    more = [
        (draw(1, 25), [*range(draw(4, 20)), draw(50, 60)], draw(4, 16), draw(1, 3), draw(0, 2))
        for _ in range(9)
    ]
    return sorted([first, *more], key=lambda request: request[0])


def generate(seed: int, broken: str = "") -> tuple[dict[tuple[int, int], list[int]], Scheduler, int]:
    """Outputs by request and sample, from a pool that is too small for all of them."""
    scheduler, engine = Scheduler(CONFIG), Engine(seed, broken)
    waiting = workload(seed)
    owners: dict[int, tuple[int, int]] = {}
    outputs: dict[tuple[int, int], list[int]] = {}
    for step in range(10_000):
        while waiting and waiting[0][0] <= step:
            _, prompt, max_tokens, num_samples, priority = waiting.pop(0)
            scheduler.submit(prompt, max_tokens=max_tokens, num_samples=num_samples, priority=priority)
        views = engine.ring[step % 2]
        views.wait()
        buffers = views.buffers
        plan = scheduler.plan(buffers)
        if plan is None:
            if waiting:
                continue
            return outputs, scheduler, engine.num_overlaps
        for place in range(plan.num_placed):
            owner = (int(buffers.placed_requests[place]), int(buffers.placed_children[place]))
            owners[int(buffers.placed_rows[place])] = owner
        rows = buffers.sample_rows[: plan.num_samples].tolist()
        samples = engine.launch(views, plan)
        tokens = [token + owners[row][1] for row, token in zip(rows, samples, strict=True)]
        scheduler.apply(plan, np.array(tokens, np.int64), np.full(len(rows), OUTCOME_OK, np.uint8))
        for row, token in zip(rows, tokens, strict=True):
            outputs.setdefault(owners[row], []).append(token)
    raise AssertionError("nothing makes progress")


def expected(seed: int) -> dict[tuple[int, int], list[int]]:
    """What each request says when its tokens are summed without a cache."""
    outputs = {}
    for number, (_, prompt, max_tokens, num_samples, _) in enumerate(workload(seed)):
        for sample in range(num_samples):
            tokens = list(prompt)
            for _ in range(max_tokens):
                total = sum((3 * place + 1) * token for place, token in enumerate(tokens))
                tokens.append(total % VOCAB + sample)
            outputs[number, sample] = tokens[len(prompt) :]
    return outputs


def test_the_order_is_enough() -> None:
    num_overlaps = 0
    for seed in range(20):
        outputs, scheduler, overlaps = generate(seed)
        assert outputs == expected(seed)
        assert scheduler.stats().swapped_in_blocks > 0
        num_overlaps += overlaps
    assert num_overlaps > 0


@pytest.mark.parametrize(
    "rule",
    [
        "a step waits for its copies",
        "arrays stay until the copies have read them",
        "copies wait for the step before",
        "host arrays stay until they are read",
    ],
)
def test_without_a_rule_tokens_are_wrong(rule: str) -> None:
    assert any(generate(seed, rule)[0] != expected(seed) for seed in range(60))
