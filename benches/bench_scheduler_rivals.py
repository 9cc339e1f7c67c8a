"""What does a step of another scheduler cost, beside pykv's in the same run?

The cases are those of bench_scheduler.py that both can do: 256 sequences that decode, and a prompt of 2,048 tokens of
which 1,536 are cached. Both run the same requests in turn, step by step, through their Python faces; medians. A step is
the plan and the hand-over of a token for each sequence, in the form that each scheduler asks for. Left out: the model,
and reading the plan (pykv fills numpy arrays meanwhile; the rival builds its lists when asked).

The rival is tokenspeed-scheduler (`pip install tokenspeed-scheduler`), skipped by name where it is missing.
Run: `python benches/bench_scheduler_rivals.py [--json] [--steps N]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers

BLOCK_SIZE = 16
NUM_SEQS = 256
BUDGET = 8192


class Contender(Protocol):
    """A scheduler; a request's number is the caller's."""

    name: str

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None: ...

    def plan(self) -> None: ...

    def apply(self) -> None:
        """Hands a token over for each sequence of the plan whose prompt is computed."""

    def num_decoding(self) -> int: ...

    def num_tokens(self) -> int:
        """Tokens that the plan computes."""


class Pykv:
    """pykv.scheduler.Scheduler."""

    name = "pykv"

    def __init__(self, num_blocks: int) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=BUDGET,
        )
        self.scheduler = Scheduler(config)
        self.buffers = StepBuffers(config)
        self.sampled = np.full(NUM_SEQS, 7, np.int64)
        self.outcomes = np.full(NUM_SEQS, OUTCOME_OK, np.uint8)

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        self.scheduler.submit(prompt, max_tokens=max_tokens)

    def plan(self) -> None:
        self.step = self.scheduler.plan(self.buffers)

    def apply(self) -> None:
        if self.step is not None:
            count = self.step.num_samples
            self.scheduler.apply(self.step, self.sampled[:count], self.outcomes[:count])

    def num_decoding(self) -> int:
        return self.step.num_decodes if self.step else 0

    def num_tokens(self) -> int:
        return self.step.num_tokens if self.step else 0


class Tokenspeed:
    """tokenspeed_scheduler.Scheduler with one group of full attention and no host tier."""

    name = "tokenspeed"

    def __init__(self, num_blocks: int) -> None:
        import tokenspeed_scheduler

        self.package: Any = tokenspeed_scheduler
        group = self.package.CacheGroupConfig()
        group.group_id = "full"
        group.block_granularity = BLOCK_SIZE
        group.total_pages = num_blocks
        group.attn_kind = self.package.AttnKind.Full
        group.transfer_policy = self.package.CacheTransferPolicy.FullSuffix
        config = self.package.SchedulerConfig()
        config.cache_groups = [group]
        config.num_device_pages = num_blocks
        config.num_host_pages = config.num_snapshot_pages = 1
        config.disable_l2_cache = True
        config.prefix_granularity = BLOCK_SIZE
        config.max_batch_size = NUM_SEQS
        config.max_scheduled_tokens = BUDGET
        config.enable_mixed_prefill_decode = True
        self.scheduler = self.package.Scheduler(config)
        self.number = 0
        self.left: dict[str, int] = {}

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        self.number += 1
        request = self.package.RequestSpec()
        request.request_id = str(self.number)
        request.tokens = prompt.tolist()
        request.max_new_tokens = max_tokens
        self.left[request.request_id] = max_tokens
        self.scheduler.submit_requests([request])

    def plan(self) -> None:
        self.forward = self.scheduler.next_execution_plan().forward

    def apply(self) -> None:
        event = self.package.ExecutionEvent()
        for batch in self.forward:
            ends = zip(batch.extend_prefix_lens, batch.input_lengths, batch.prefill_lengths, strict=False)
            computed = [prefix + length >= total for prefix, length, total in ends]
            for place, request in enumerate(batch.request_ids):
                if place < batch.num_extends() and not computed[place]:
                    continue
                result = self.package.ForwardEvent.ExtendResult()
                result.request_id = request
                result.tokens = [7]
                event.add_event(result)
                self.left[request] -= 1
                if self.left[request] == 0:
                    finish = self.package.ForwardEvent.Finish()
                    finish.request_id = request
                    event.add_event(finish)
        self.scheduler.advance(event)

    def num_decoding(self) -> int:
        return sum(len(batch.request_ids) - batch.num_extends() for batch in self.forward)

    def num_tokens(self) -> int:
        return sum(sum(batch.input_lengths) for batch in self.forward)


def contenders(num_blocks: int) -> list[Contender]:
    """Those that are installed; the others are named on the error stream."""
    present: list[Contender] = []
    for contender in (Pykv, Tokenspeed):
        try:
            present.append(contender(num_blocks))
        except ImportError as error:
            print(f"bench_scheduler_rivals: {contender.name} is skipped: {error}", file=sys.stderr)
    return present


def timed(*calls: Callable[[], object]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def decode_steps(steps: int) -> dict[str, list[float]]:
    """Seconds of steps of 256 decodes, by contender."""
    random = np.random.default_rng(5)
    prompts = random.integers(0, 50_000, (NUM_SEQS, 128)).astype(np.int32)
    max_tokens = steps + 100
    schedulers = contenders(NUM_SEQS * (128 + max_tokens + 100) // BLOCK_SIZE)
    for scheduler in schedulers:
        for prompt in prompts:
            scheduler.submit(prompt, max_tokens)
        for _ in range(50):
            scheduler.plan()
            scheduler.apply()
            if scheduler.num_decoding() == NUM_SEQS:
                break
        else:
            raise RuntimeError(f"{scheduler.name} never ran {NUM_SEQS} sequences at once")
    seconds: dict[str, list[float]] = {scheduler.name: [] for scheduler in schedulers}
    for _ in range(steps):
        for scheduler in schedulers:
            seconds[scheduler.name].append(timed(scheduler.plan, scheduler.apply))
    return seconds


def admissions(count: int) -> dict[str, list[float]]:
    """Seconds of `submit` and plan of a prompt of 2,048 tokens of which 1,536 are cached, by contender."""
    random = np.random.default_rng(5)

    def tokens(length: int) -> np.ndarray:
        return random.integers(0, 50_000, length).astype(np.int32)

    schedulers = contenders(count * 2048 // BLOCK_SIZE + 1000)
    shared = tokens(1536)
    for scheduler in schedulers:
        scheduler.submit(np.append(shared, np.int32(1)), 1)
        scheduler.plan()
        scheduler.apply()
    seconds: dict[str, list[float]] = {scheduler.name: [] for scheduler in schedulers}
    for _ in range(count):
        prompt = np.concatenate([shared, tokens(512)])
        for scheduler in schedulers:
            seconds[scheduler.name].append(
                timed(lambda s=scheduler, p=prompt: s.submit(p, 1), scheduler.plan)
            )
            if scheduler.num_tokens() != 512:
                raise RuntimeError(f"{scheduler.name} computes {scheduler.num_tokens()} tokens, 512 are new")
            scheduler.apply()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--steps", type=int, default=200, help="measurements of each case (default 200)")
    options = parser.parse_args()
    cases = {"decode_step_256": decode_steps, "admit_2048_shared75": admissions}
    for case, measure in cases.items():
        for contender, seconds in measure(options.steps).items():
            value = statistics.median(seconds) * 1e6
            line = {
                "bench": "scheduler_rivals",
                "case": case,
                "metric": contender,
                "value": value,
                "unit": "us",
            }
            line["n"] = len(seconds)
            print(
                json.dumps(line) if options.json else f"{case:20} {contender:12} {value:12.2f} us", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
