"""What do a lookup, an insertion and an eviction in the prefix cache cost, beside others' caches?

A prompt is 1,024 tokens in blocks of 16. `insert`: a computed prompt becomes findable. `match_N`: a lookup that finds N
tokens. `evict`: room for a prompt in a cache full of idle ones. Everything through each package's Python face, all
packages in turn in one run; medians of microseconds a prompt. Left out: making the token arrays, which each package
gets in the form that it likes best.

Rivals, skipped by name where they are missing: transformers' PagedAttentionCache, and the compiled tree in sglang
(`pip install --no-deps sglang`, without its other parts). The tree keeps no blocks; one slot number a token stands for
them, and its `evict` returns those.
Run: `python benches/bench_prefix.py [--json] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from pykv.blocks import BlockPool, PrefixCache

BLOCK_SIZE = 16
PROMPT = 1024
BLOCKS = PROMPT // BLOCK_SIZE
DEPTHS = (256, 1024, 16_384)


class Contender(Protocol):
    """A prefix cache with room for so many blocks; what it is given to time is prepared before."""

    name: str
    evicts_one: bool

    def __init__(self, num_blocks: int) -> None: ...

    def inserts(self, tokens: np.ndarray) -> Callable[[], object]:
        """Prepares a computed prompt; the call makes it findable."""

    def matches(self, tokens: np.ndarray) -> Callable[[], int]:
        """A lookup that returns how many tokens were found."""

    def settles(self) -> None:
        """Makes what was inserted idle."""

    def evicts(self) -> Callable[[], object]:
        """Makes room for one prompt in a full cache, if it `evicts_one`."""


class Pykv:
    """pykv.blocks.PrefixCache."""

    name = "pykv"
    evicts_one = True

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(BlockPool(num_blocks + 1, BLOCK_SIZE))
        self.tables: list[object] = []

    def inserts(self, tokens: np.ndarray) -> Callable[[], object]:
        table = self.cache.pool.table()
        self.cache.extend(table, len(tokens) // BLOCK_SIZE)
        self.tables.append(table)
        return lambda: self.cache.publish(table, tokens, num_tokens=len(tokens))

    def matches(self, tokens: np.ndarray) -> Callable[[], int]:
        return lambda: self.cache.probe(tokens)

    def settles(self) -> None:
        self.tables.clear()
        self.cache.count()

    def evicts(self) -> Callable[[], object]:
        table = self.cache.pool.table()
        self.tables.append(table)
        return lambda: self.cache.extend(table, BLOCKS)


class SglangTree:
    """The compiled tree that the wheel of sglang brings, without the package around it."""

    name = "sglang_tree"
    evicts_one = True
    full = 0

    def __init__(self, num_blocks: int) -> None:
        import torch  # its libraries must be there before the tree's

        self.torch = torch
        self.native = load_sglang_tree()
        options = self.native.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=BLOCK_SIZE, device="cpu"
        )
        self.tree = self.native.RustUnifiedTreeCoreBinding(options, [self.full])
        self.next_slot = 0

    def inserts(self, tokens: np.ndarray) -> Callable[[], object]:
        slots = self.torch.arange(self.next_slot, self.next_slot + len(tokens))
        self.next_slot += len(tokens)
        key = array("q", tokens.tolist())
        return lambda: self.tree.insert(self.native.InsertParamsBinding(key=key, value=slots))

    def matches(self, tokens: np.ndarray) -> Callable[[], int]:
        key = array("q", tokens.tolist())
        return lambda: self.tree.match_prefix(self.native.MatchParamsBinding(key=key)).device_prefix_len

    def settles(self) -> None:
        """What is inserted is idle."""

    def evicts(self) -> Callable[[], object]:
        def evict() -> None:
            evicted = 0
            self.tree.evict_device_start(self.full, PROMPT)
            while evicted < PROMPT:
                node = self.tree.evict_device_next_node(self.full, {self.full: evicted}).node_id
                evicted += self.tree.evict_device_leaf(node).tracker[self.full]
            self.tree.evict_device_end(self.full)

        return evict


class TransformersCache:
    """transformers' PagedAttentionCache over one tiny layer, so that its tensor costs nothing."""

    name = "transformers"
    evicts_one = False

    def __init__(self, num_blocks: int) -> None:
        import torch
        from transformers import LlamaConfig
        from transformers.generation import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState

        self.state_type = RequestState
        model = LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
        )
        options = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE, num_blocks=num_blocks, max_batch_tokens=256, max_memory_percent=0.1
        )
        self.cache = PagedAttentionCache(
            model, options, torch.device("cpu"), DistributedHelper(None, None), torch.float32
        )
        self.live: list[str] = []
        self.number = 0

    def inserts(self, tokens: np.ndarray) -> Callable[[], object]:
        self.number += 1
        state = self.state_type(str(self.number), tokens.tolist())
        if not self.cache.can_store_request_tokens(state, len(tokens)):
            raise RuntimeError("transformers' cache is full")
        blocks = self.cache.count_new_complete_blocks(state, len(tokens))
        self.live.append(state.request_id)
        return lambda: self.cache.mark_complete_blocks(state, blocks)

    def matches(self, tokens: np.ndarray) -> Callable[[], int]:
        prompt = [*tokens.tolist(), 0]
        (allocator,) = self.cache.cache_allocators.values()
        return lambda: len(allocator.match_prefix_blocks(prompt)) * BLOCK_SIZE

    def settles(self) -> None:
        for request in self.live:
            self.cache.free_blocks(request)
        self.live.clear()

    def evicts(self) -> Callable[[], object]:
        raise NotImplementedError("it evicts all that is idle at once")


def load_sglang_tree() -> object:
    """The compiled module, found in the package's folder: importing the package wants all its dependencies."""
    package = importlib.util.find_spec("sglang")
    folders = package.submodule_search_locations if package else None
    if not folders:
        raise ImportError("sglang is not installed")
    files = list(Path(folders[0], "srt/mem_cache/rust_tree_core").glob("mem_cache.*.so"))
    if not files:
        raise ImportError("this sglang has no compiled tree")
    spec = importlib.util.spec_from_file_location("sglang.srt.mem_cache.rust_tree_core.mem_cache", files[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"{files[0].name} is no module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contenders(num_blocks: int) -> list[Contender]:
    """Those that are installed; the others are named on the error stream."""
    present: list[Contender] = []
    for contender in (Pykv, SglangTree, TransformersCache):
        try:
            present.append(contender(num_blocks))
        except ImportError as error:
            print(f"bench_prefix: {contender.name} is skipped: {error}", file=sys.stderr)
    return present


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds by case and contender, every contender in each round."""
    seconds: dict[tuple[str, str], list[float]] = {}
    random = np.random.default_rng(7)

    def tokens(length: int) -> np.ndarray:
        return random.integers(0, 50_000, length).astype(np.int32)

    # Room for the rounds of each depth, then a quarter more.
    num_blocks = (max(DEPTHS) + (rounds + 1) * PROMPT) // BLOCK_SIZE * 5 // 4
    caches = contenders(num_blocks)
    deep = tokens(max(DEPTHS))
    for cache in caches:
        cache.inserts(deep)()
        cache.settles()
    for _ in range(rounds):
        prompt = tokens(PROMPT)
        for cache in caches:
            seconds.setdefault(("insert", cache.name), []).append(timed(cache.inserts(prompt)))
            cache.settles()
        for depth in DEPTHS:
            for cache in caches:
                call = cache.matches(deep[:depth])
                if (found := call()) != depth:
                    raise RuntimeError(f"{cache.name} found {found} of {depth} tokens")
                seconds.setdefault((f"match_{depth}", cache.name), []).append(timed(call))
    fill = [tokens(PROMPT) for _ in range(rounds + 1)]
    full = [type(cache)(len(fill) * BLOCKS) for cache in caches if cache.evicts_one]
    for cache in full:
        for prompt in fill:
            cache.inserts(prompt)()
            cache.settles()
    for _ in range(rounds):
        for cache in full:
            seconds.setdefault(("evict", cache.name), []).append(timed(cache.evicts()))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=200, help="measurements of each case (default 200)")
    options = parser.parse_args()
    for (case, contender), seconds in measure(options.rounds).items():
        value = statistics.median(seconds) * 1e6
        line = {
            "bench": "prefix",
            "case": case,
            "metric": contender,
            "value": value,
            "unit": "us",
            "n": len(seconds),
        }
        print(json.dumps(line) if options.json else f"{case:14} {contender:14} {value:12.2f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
