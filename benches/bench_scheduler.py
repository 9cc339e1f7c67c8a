"""What does the scheduler cost a step, and does that cost stay flat?

Measured through the Python face: `plan` and `apply` of whole steps, prompts as int32 arrays, medians. Left out: the
model, sampling, and making the arrays that a real engine would have anyway.
Run: `python benches/bench_scheduler.py [--json] [CASE ...]`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pykv.scheduler import OUTCOME_OK, Plan, Scheduler, SchedulerConfig, StepBuffers


@dataclass(frozen=True)
class Result:
    """One line of output: a median of `n` measurements."""

    case: str
    metric: str
    value: float
    unit: str
    n: int


class Driver:
    """A scheduler whose steps are applied with the same token for every sample, or random ones."""

    def __init__(self, page_lists: bool = False, **options: object) -> None:
        self.config = SchedulerConfig(**options)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.buffers = [StepBuffers(self.config, page_lists=page_lists) for _ in range(2)]
        self.steps = 0
        self.random = np.random.default_rng(5)
        self.outcomes = np.full(self.config.max_num_seqs, OUTCOME_OK, np.uint8)

    def plan(self) -> Plan | None:
        self.steps += 1
        return self.scheduler.plan(self.buffers[self.steps % 2])

    def apply(self, plan: Plan, sampled: np.ndarray) -> int:
        return len(self.scheduler.apply(plan, sampled, self.outcomes[: plan.num_samples]))

    def step(self) -> Plan | None:
        plan = self.plan()
        if plan is not None:
            self.apply(plan, self.random.integers(0, 50_000, plan.num_samples))
        return plan

    def prefill(self, num_seqs: int, prompt_len: int, max_tokens: int) -> None:
        for _ in range(num_seqs):
            self.scheduler.submit(self.prompt(prompt_len), max_tokens=max_tokens)
        for _ in range(10_000):
            plan = self.step()
            if plan is not None and plan.num_decodes == num_seqs:
                return
        raise RuntimeError(f"{num_seqs} sequences never ran at once")

    def prompt(self, length: int) -> np.ndarray:
        return self.random.integers(0, 50_000, length).astype(np.int32)

    def time_decodes(self, num_seqs: int, count: int) -> list[float]:
        sampled = self.random.integers(0, 50_000, (count, num_seqs))
        seconds = []
        for index in range(count):
            start = time.perf_counter()
            plan = self.plan()
            assert plan is not None
            self.apply(plan, sampled[index])
            seconds.append(time.perf_counter() - start)
            assert plan.num_decodes == num_seqs
        self.scheduler.check()
        return seconds


def microseconds(case: str, seconds: list[float]) -> Result:
    return Result(case, "plan_apply", statistics.median(seconds) * 1e6, "us", len(seconds))


def decode_step(num_seqs: int, count: int, *, page_lists: bool = False) -> Result:
    driver = Driver(
        page_lists=page_lists,
        num_blocks=num_seqs * (128 + count + 200) // 16 + 4 * num_seqs,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_queued_requests=num_seqs,
    )
    driver.prefill(num_seqs, 128, count + 100)
    name = f"decode_step_{num_seqs}" + ("_page_lists" if page_lists else "")
    return microseconds(name, driver.time_decodes(num_seqs, count))


def decode_step_two_in_flight(count: int = 2000) -> Result:
    """256 sequences in decode: each step is planned before the one before it is applied."""
    driver = Driver(
        num_blocks=256 * (128 + count + 200) // 16 + 1024,
        max_num_batched_tokens=8192,
        max_steps_in_flight=2,
    )
    driver.prefill(256, 128, count + 100)
    sampled = driver.random.integers(0, 50_000, (count, 256))
    seconds, before = [], driver.plan()
    for index in range(count):
        start = time.perf_counter()
        plan = driver.plan()
        assert before is not None
        assert plan is not None
        driver.apply(before, sampled[index])
        seconds.append(time.perf_counter() - start)
        assert plan.num_decodes == 256
        before = plan
    driver.scheduler.check()
    return microseconds("decode_step_256_two_in_flight", seconds)


def decode_step_drafts(num_drafts: int = 3, count: int = 1000) -> Result:
    """256 sequences with drafts each, none of which is right: `propose`, `plan` and `apply`."""
    driver = Driver(
        num_blocks=256 * (128 + count + 400) // 16 + 1024,
        max_num_batched_tokens=8192,
        num_lookahead_tokens=num_drafts,
    )
    driver.prefill(256, 128, count + 200)
    rows = np.arange(256, dtype=np.int32)
    starts = np.arange(257, dtype=np.int32) * num_drafts
    drafts = np.full(256 * num_drafts, 50_000)
    sampled = driver.random.integers(0, 50_000, (count, 256 * (1 + num_drafts)))
    seconds = []
    for index in range(count):
        start = time.perf_counter()
        driver.scheduler.propose(rows, starts, drafts)
        plan = driver.plan()
        assert plan is not None
        driver.scheduler.apply(plan, sampled[index], np.zeros(plan.num_samples, np.uint8))
        seconds.append(time.perf_counter() - start)
        assert plan.num_draft_rows == 256
    return Result(
        f"decode_step_256_drafts_{num_drafts}",
        "propose_plan_apply",
        statistics.median(seconds) * 1e6,
        "us",
        count,
    )


def decode_step_full_pool(num_blocks: int, name: str, count: int = 1000) -> Result:
    """256 sequences that decode while every new block evicts a cached one."""
    driver = Driver(
        num_blocks=num_blocks,
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        watermark=0.0,
        admission="watermark",
    )
    fill = (num_blocks - 256 * 8) // 4 * 4
    for _ in range(0, fill, 64):
        driver.scheduler.submit(driver.prompt(1024), max_tokens=1)
        driver.step()
    while driver.step() is not None:
        pass
    prompt_len = 16 * max(1, (num_blocks - 256 * (count // 16 + 2)) // 256 // 2)
    driver.prefill(256, min(prompt_len, 128), count + 100)
    evictions = driver.scheduler.stats().evictions
    seconds = driver.time_decodes(256, count)
    assert driver.scheduler.stats().evictions > evictions, "the pool was not full"
    return microseconds(f"decode_step_256_full_pool_{name}", seconds)


def admit_shared(case: str, num_partial: int = 0, count: int = 400) -> Result:
    """`submit` and `plan` of a 2,048-token prompt of which 96 of 128 blocks are cached, and some tokens of the next."""
    driver = Driver(num_blocks=200_000, max_num_batched_tokens=8192, partial_block_reuse=num_partial)
    shared = driver.prompt(1536 + 16)
    driver.scheduler.submit(shared, max_tokens=1)
    driver.step()
    common = 1536 + num_partial
    prompts = [np.concatenate([shared[:common], driver.prompt(2048 - common)]) for _ in range(count)]
    seconds = []
    for prompt in prompts:
        start = time.perf_counter()
        driver.scheduler.submit(prompt, max_tokens=1)
        plan = driver.plan()
        seconds.append(time.perf_counter() - start)
        assert plan is not None
        assert plan.num_tokens == 512 - num_partial
        driver.apply(plan, np.zeros(1, np.int64))
    return Result(case, "submit_plan", statistics.median(seconds) * 1e6, "us", count)


def long_context_step(count: int = 500) -> Result:
    medians = {}
    for length in (1_000, 1_000_000):
        driver = Driver(
            num_blocks=70_000, max_num_seqs=4, max_num_batched_tokens=1_000_000, max_model_len=1_100_000
        )
        driver.prefill(1, length, count + 100)
        medians[length] = statistics.median(driver.time_decodes(1, count))
    return Result("long_context_step", "ratio", medians[1_000_000] / medians[1_000], "", count)


def recompute_tax() -> list[Result]:
    """256 requests at once in a pool that is too small: tokens computed again, and steps over a run at watermark 0."""

    def run(**options: object) -> tuple[float, int]:
        driver = Driver(
            num_blocks=4097,
            max_num_batched_tokens=8192,
            max_model_len=2048,
            enable_prefix_caching=False,
            **options,
        )
        lengths = random.Random(5)
        needed = 0
        for _ in range(256):
            prompt, output = lengths.randint(64, 1024), lengths.randint(64, 1024)
            needed += prompt + output - 1
            driver.scheduler.submit(driver.prompt(prompt), max_tokens=output)
        while driver.step() is not None:
            pass
        stats = driver.scheduler.stats()
        return 100 * stats.recomputed_tokens / needed, stats.steps

    tax, steps = run()
    tax_zero, steps_zero = run(watermark=0.0, admission="watermark")
    return [
        Result("recompute_tax", "tokens", tax, "%", 1),
        Result("recompute_tax_watermark_0", "tokens", tax_zero, "%", 1),
        Result("recompute_steps_ratio", "steps", steps / steps_zero, "", 1),
    ]


CASES: dict[str, Callable[[], Result | list[Result]]] = {
    "decode_step_256": lambda: decode_step(256, 2000),
    "decode_step_256_page_lists": lambda: decode_step(256, 2000, page_lists=True),
    "decode_step_256_two_in_flight": decode_step_two_in_flight,
    "decode_step_256_drafts_3": decode_step_drafts,
    "decode_step_4096": lambda: decode_step(4096, 200),
    "decode_step_256_full_pool_4k": lambda: decode_step_full_pool(4_096, "4k", 200),
    "decode_step_256_full_pool_32k": lambda: decode_step_full_pool(32_768, "32k"),
    "decode_step_256_full_pool_1m": lambda: decode_step_full_pool(1_000_000, "1m"),
    "admit_2048_shared75": lambda: admit_shared("admit_2048_shared75"),
    "admit_2048_shared75_partial": lambda: admit_shared("admit_2048_shared75_partial", num_partial=8),
    "long_context_step": long_context_step,
    "recompute_tax": recompute_tax,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: allowed are {', '.join(CASES)}")
    for case in options.cases or CASES:
        results = CASES[case]()
        for result in [results] if isinstance(results, Result) else results:
            line = {"bench": "scheduler", **vars(result)}
            print(
                json.dumps(line) if options.json else f"{result.case:34} {result.value:12.3f} {result.unit}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
