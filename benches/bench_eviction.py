"""How much does the prefix cache find under each eviction policy, and with sessions that are known to end?

A synthetic trace, the same for every case: chats of several turns (each turn repeats all before it) that share one of
a few system prompts, mixed with long prompts that come once. Measured: the share of the prompts' tokens that were
found, in a pool of 3,000 blocks of 16 tokens. Left out: time, and everything but the cache.
Run: `python benches/bench_eviction.py [--json] [CASE ...]`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pykv.scheduler import OUTCOME_OK, Scheduler, SchedulerConfig, StepBuffers

BLOCK_SIZE = 16
NUM_BLOCKS = 3_000
CASES = {
    "lru": {"eviction": "lru"},
    "segmented_lru": {"eviction": "segmented_lru"},
    "lru_sessions_end": {"eviction": "lru"},
    "segmented_lru_sessions_end": {"eviction": "segmented_lru"},
}


@dataclass(frozen=True)
class Turn:
    """One request: its prompt, its session if it has one, and whether that ends with it."""

    prompt: np.ndarray
    session: bytes | None
    is_last: bool


def trace(num_chats: int = 600, at_once: int = 40) -> Iterator[Turn]:
    """Turns of chats that overlap, and a prompt that comes once after every other turn."""
    draw, tokens = random.Random(5), np.random.default_rng(5)

    def new_tokens(num_blocks: int) -> np.ndarray:
        return tokens.integers(0, 50_000, num_blocks * BLOCK_SIZE).astype(np.int32)

    systems = [new_tokens(32) for _ in range(4)]
    chats: list[tuple[bytes, np.ndarray, int]] = []
    started = 0
    while started < num_chats or chats:
        while len(chats) < at_once and started < num_chats:
            chats.append((b"%d" % started, draw.choice(systems), draw.randint(1, 8)))
            started += 1
        name, history, turns = chats.pop(draw.randrange(len(chats)))
        prompt = np.concatenate([history, new_tokens(draw.randint(2, 12))])
        yield Turn(prompt, name, turns == 1)
        if turns > 1:
            chats.append((name, prompt, turns - 1))
        if draw.random() < 0.5:
            yield Turn(new_tokens(draw.randint(16, 64)), None, False)


def hit_rate(case: str) -> tuple[float, int]:
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS + 1,
        max_num_batched_tokens=8_192,
        max_model_len=8_192,
        max_num_seqs=8,
        **CASES[case],  # type: ignore[arg-type]
    )
    scheduler, buffers = Scheduler(config), StepBuffers(config)
    found = asked = num_requests = 0
    for turn in trace():
        ends = case.endswith("sessions_end")
        # What comes once says so: its blocks are worth nothing from the start.
        ttl = 0.0 if ends and turn.session is None else None
        scheduler.submit(turn.prompt, max_tokens=1, session=turn.session if ends else None, ttl=ttl)
        plan = scheduler.plan(buffers, float(num_requests))
        assert plan is not None
        (ended,) = scheduler.apply(plan, np.zeros(1, np.int64), np.full(1, OUTCOME_OK, np.uint8))
        if ends and turn.is_last and turn.session is not None:
            assert scheduler.end_session(turn.session)
        found += ended.cached_tokens
        asked += ended.prompt_tokens
        num_requests += 1
    scheduler.check()
    assert scheduler.stats().evictions > 10 * NUM_BLOCKS, "the pool was too large to tell policies apart"
    return 100 * found / asked, num_requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: allowed are {', '.join(CASES)}")
    for case in options.cases or CASES:
        value, n = hit_rate(case)
        line = {"bench": "eviction", "case": case, "metric": "hit_rate", "value": value, "unit": "%", "n": n}
        print(json.dumps(line) if options.json else f"{case:30} {value:8.2f} %", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
