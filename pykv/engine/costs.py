"""What it costs to bring a preempted sequence back: measured here, chosen by in the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pykv.engine.runner import Runner

__all__ = ["PrefillMeter", "seconds_per_block"]

PROBED_BYTES = 2**26
"""Blocks of this size in sum are copied to see what one costs: more than most processors keep near."""

ROUNDS = 3


def seconds_per_block(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> float:
    """Copies blocks that nobody has yet out to the host and in again; returns the seconds of one copy of one block.

    Args:
        runner: it keeps blocks on the host; no sequence runs.
    """
    block_bytes = max(1, runner.block_size * runner.kv_bytes_per_token)
    count = min(runner.num_blocks - 1, runner.num_host_blocks - 1, 1 + PROBED_BYTES // block_bytes)
    pairs = torch.arange(1, count + 1, device=runner.device).repeat(2, 1).T.contiguous()
    seconds = []
    for copy in (runner.swap_in, runner.swap_out) * (1 + ROUNDS):  # memory comes with its first use
        start = clock()
        copy(pairs)
        _wait_for(runner.device)
        seconds.append(clock() - start)
    return min(map(sum, zip(seconds[2::2], seconds[3::2], strict=True))) / (2 * count)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PrefillMeter:
    """The seconds that one token of a prompt takes, as the steps show it.

    A step counts if most of its tokens are of prompts, and as much as it has tokens: an exponential mean over tokens.
    """

    MEMORY_TOKENS = 4096
    FEWEST_TOKENS = 16

    def __init__(self) -> None:
        self.seconds_per_token = 0.0

    def add(self, num_tokens: int, num_decodes: int, seconds: float) -> bool:
        """Takes in one step; returns whether it counted."""
        if num_tokens < max(self.FEWEST_TOKENS, 2 * num_decodes):
            return False
        share = 1.0 if self.seconds_per_token == 0.0 else min(1.0, num_tokens / self.MEMORY_TOKENS)
        self.seconds_per_token += share * (seconds / num_tokens - self.seconds_per_token)
        return True
