"""How near does attention on the CPU come to the memory's read bandwidth, and how does it compare with torch?

Each case lays sequences into a paged cache of at least 1 GiB of distinct layers, allocated as the engine allocates its
pool, and calls the attention on one layer after another, so that no cache holds what is read. In every round the plain
read of the same memory, pykv and the rivals take their turns; a ratio is made within its round, and the median of the
rounds is printed. Left out of the timing: filling the caches, and the rivals' contiguous copies of them.

    <case>_bandwidth   bytes of keys and values over time, as a fraction of the plain read
    <case>_shuffled    the same, the blocks of all sequences mixed
    <case>_vs_sdpa     speed over torch's scaled_dot_product_attention(enable_gqa=True) on contiguous keys and values
    <case>_vs_gather   speed over gathering the pages into contiguous memory and then the same

Run it on a quiet machine, from the root:

    python benches/bench_attention.py [--json] [--cases decode_smollm,...] [--rounds 5] [--gib 1.0]

With --json each line is an object: {"bench", "case", "metric", "value", "unit", "n"}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from pykv._core import CpuAttention
from pykv.attention import copy_blocks, cpu_backend, paged_attention, write_kv
from pykv.host_memory import anonymous_memory

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Decodes of `num_seqs` sequences of `seq_len` tokens."""

    num_seqs: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.seq_len // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * self.blocks_per_seq + 1

    @property
    def query_dtype(self) -> torch.dtype:
        return self.dtype if self.dtype.itemsize > 1 else torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """What one layer's attention must read."""
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim * self.dtype.itemsize


SMOLLM = Shape(32, 2048, 9, 3, 64)
LLAMA = Shape(8, 4096, 32, 8, 128)
LONG = Shape(1, 32768, 32, 8, 128)
DECODES = {
    "decode_smollm": SMOLLM,
    "decode_smollm_f32": replace(SMOLLM, dtype=torch.float32),
    "decode_llama8b": LLAMA,
    "decode_llama8b_f32": replace(LLAMA, dtype=torch.float32),
    "decode_long": LONG,
    "decode_long_f32": replace(LONG, dtype=torch.float32),
}


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    case: str
    metric: str
    value: float
    unit: str
    n: int


class Pool:
    """Layers of a paged cache in one piece of memory, filled with numbers, and the sequences' tables."""

    def __init__(self, shape: Shape, min_bytes: int) -> None:
        self.shape = shape
        layer_bytes = 2 * shape.num_blocks * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim
        layer_bytes *= shape.dtype.itemsize
        self.num_layers = max(1, -(-min_bytes // layer_bytes))
        self.memory = torch.frombuffer(anonymous_memory(self.num_layers * layer_bytes), dtype=torch.uint8)
        fill(self.memory, shape.dtype)
        size = (shape.num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        layers = [part.view(shape.dtype).view(size) for part in self.memory.split(layer_bytes)]
        self.key_caches = [layer[:, 0] for layer in layers]
        self.value_caches = [layer[:, 1] for layer in layers]
        size = (shape.num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE)
        self.scales = torch.full(size, 0.01) if shape.dtype.itemsize == 1 else None
        self.tables = self.tables_of(torch.arange(1, shape.num_blocks))
        self.shuffled = self.tables_of(torch.randperm(shape.num_blocks - 1) + 1)
        self.query = torch.randn(shape.num_seqs, shape.num_heads, shape.head_dim).to(shape.query_dtype)
        self.seq_lens = torch.full((shape.num_seqs,), shape.seq_len, dtype=torch.int32)
        self.query_starts = torch.arange(shape.num_seqs + 1, dtype=torch.int32)
        self.out = torch.empty_like(self.query)

    def tables_of(self, blocks: Tensor) -> Tensor:
        return blocks.to(torch.int32).view(self.shape.num_seqs, -1)

    def attend(self, layer: int, tables: Tensor | None = None) -> Tensor:
        return paged_attention(
            self.query,
            self.key_caches[layer],
            self.value_caches[layer],
            block_tables=self.tables if tables is None else tables,
            seq_lens=self.seq_lens,
            query_starts=self.query_starts,
            kv_scales=self.scales,
            out=self.out,
            backend="cpu",
        )

    def gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns contiguous keys and values [num_seqs, num_kv_heads, seq_len, head_dim]."""
        shape = self.shape
        size = (shape.num_seqs, shape.num_kv_heads, -1, shape.head_dim)
        caches = (self.key_caches[layer], self.value_caches[layer])
        pages = [cache[self.tables.long()].transpose(1, 2).reshape(size) for cache in caches]
        return pages[0][:, :, : shape.seq_len], pages[1][:, :, : shape.seq_len]


def fill(memory: Tensor, dtype: torch.dtype) -> None:
    """Writes ordinary numbers all over: a read of untouched pages would read one page of zeros."""
    numbers = (
        torch.randint(-127, 128, (1 << 22,)).to(torch.int8)
        if dtype is torch.int8
        else torch.randn(1 << 20).to(dtype)
    )
    pattern = numbers.view(torch.uint8)
    for part in memory.split(len(pattern)):
        part.copy_(pattern[: len(part)])


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Decodes with torch: query [num_seqs, num_heads, head_dim], contiguous keys and values."""
    return functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def seconds(work: Callable[[int], object], calls: range) -> float:
    """Returns the median time of a call."""
    times = []
    for call in calls:
        start = time.perf_counter()
        work(call)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(memory: Tensor) -> float:
    """Returns the bytes a second of a plain read by as many threads as the attention uses."""
    reader = CpuAttention()
    words = memory.numel() // 8
    call = seconds(lambda _: reader.read(memory.data_ptr(), words, torch.get_num_threads()), range(3))
    return memory.numel() / call


def copy_bandwidth(memory: Tensor) -> float:
    """Returns the bytes read and written a second by a plain copy of half of the memory onto the other half."""
    source, target = memory[: memory.numel() // 2 * 2].chunk(2)
    return 2 * source.numel() / seconds(lambda _: target.copy_(source), range(3))


def decode(case: str, shape: Shape, rounds: int, min_bytes: int) -> Iterator[Result]:
    """Measures one decode case against the plain read and the rivals."""
    pool = Pool(shape, min_bytes)
    contiguous = [pool.gathered(layer) for layer in range(pool.num_layers)]
    check_equal(pool.attend(0), sdpa(pool.query, *contiguous[0]))
    layers = range(pool.num_layers)
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        ours = seconds(pool.attend, layers)
        read = read_bandwidth(pool.memory)
        shuffled = seconds(lambda layer: pool.attend(layer, pool.shuffled), layers)
        rival = seconds(lambda layer: sdpa(pool.query, *contiguous[layer]), layers[:4])
        gather = seconds(lambda layer: sdpa(pool.query, *pool.gathered(layer)), layers[:2])
        rows.setdefault("bandwidth", []).append(shape.kv_bytes / ours / read)
        rows.setdefault("shuffled", []).append(shape.kv_bytes / shuffled / read)
        rows.setdefault("vs_sdpa", []).append(rival / ours)
        rows.setdefault("vs_gather", []).append(gather / ours)
        rows.setdefault("gigabytes_per_second", []).append(shape.kv_bytes / ours / 1e9)
        rows.setdefault("read_gigabytes_per_second", []).append(read / 1e9)
    for metric, values in rows.items():
        unit = "GB/s" if metric.endswith("second") else "ratio"
        yield Result(case, f"{case}_{metric}", statistics.median(values), unit, rounds)


def int8_vs_bf16(rounds: int, min_bytes: int) -> Iterator[Result]:
    """Measures how many more tokens a second an int8 cache gives."""
    wide, narrow = Pool(LLAMA, min_bytes), Pool(replace(LLAMA, dtype=torch.int8), min_bytes)
    ratios = []
    for _ in range(rounds):
        slow = seconds(wide.attend, range(wide.num_layers))
        ratios.append(slow / seconds(narrow.attend, range(narrow.num_layers)))
    yield Result("int8_vs_bf16", "int8_vs_bf16", statistics.median(ratios), "ratio", rounds)


def shared_prefix(rounds: int, min_bytes: int) -> Iterator[Result]:
    """Measures 16 sequences that share 8,192 tokens, against the same without reading these together."""
    shape = replace(LLAMA, num_seqs=16, seq_len=8192 + 64)
    pool = Pool(replace(shape, num_seqs=2), min_bytes)
    own = torch.arange(1, 16 * 4 + 1).view(16, 4)
    tables = torch.cat([torch.arange(100, 100 + 512).expand(16, -1), own], dim=1).to(torch.int32)
    query = torch.randn(16, shape.num_heads, shape.head_dim).bfloat16()

    def attend(layer: int, share_prefixes: bool) -> Tensor:
        return cpu_backend.paged_attention(
            query,
            pool.key_caches[layer],
            pool.value_caches[layer],
            block_tables=tables,
            seq_lens=torch.full((16,), shape.seq_len, dtype=torch.int32),
            query_starts=torch.arange(17, dtype=torch.int32),
            table_rows=None,
            scale=shape.head_dim**-0.5,
            window=None,
            softcap=None,
            sinks=None,
            out=torch.empty_like(query),
            share_prefixes=share_prefixes,
        )

    assert attend(0, True).equal(attend(0, False))
    ratios = []
    for _ in range(rounds):
        alone = seconds(lambda layer: attend(layer, False), range(pool.num_layers))
        ratios.append(alone / seconds(lambda layer: attend(layer, True), range(pool.num_layers)))
    yield Result("shared_prefix_8192", "shared_prefix_8192", statistics.median(ratios), "ratio", rounds)


def prefill(rounds: int, min_bytes: int) -> Iterator[Result]:
    """Measures the prefill of one prompt of 2,048 tokens against torch on contiguous keys and values."""
    for name, dtype in (("prefill_2048", torch.bfloat16), ("prefill_2048_f32", torch.float32)):
        shape = replace(LLAMA, num_seqs=1, seq_len=2048, dtype=dtype)
        pool = Pool(shape, min_bytes // 8)
        pool.query = torch.randn(2048, shape.num_heads, shape.head_dim).to(dtype)
        pool.query_starts = torch.tensor([0, 2048], dtype=torch.int32)
        pool.out = torch.empty_like(pool.query)
        query = pool.query.transpose(0, 1)[None].contiguous()
        keys, values = pool.gathered(0)

        def rival(_: int, query: Tensor = query, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            return functional.scaled_dot_product_attention(
                query, keys, values, is_causal=True, enable_gqa=True
            )

        check_equal(pool.attend(0).transpose(0, 1)[None], rival(0))
        ratios = [seconds(rival, range(3)) / seconds(pool.attend, range(3)) for _ in range(rounds)]
        yield Result(name, f"{name}_vs_sdpa", statistics.median(ratios), "ratio", rounds)


def writes(rounds: int, min_bytes: int) -> Iterator[Result]:
    """Measures `write_kv` of 2,048 tokens, in bf16 and int8, and `copy_blocks` against a plain copy of memory."""
    pool, narrow = Pool(LLAMA, min_bytes), Pool(replace(LLAMA, dtype=torch.int8), min_bytes)
    rows = [torch.randn(2048, LLAMA.num_kv_heads, LLAMA.head_dim).bfloat16() for _ in range(2)]
    slots = [torch.arange(2048) + BLOCK_SIZE * (1 + 128 * part) for part in range(15)]
    row_bytes, narrow_bytes = 2 * 2 * rows[0].nbytes, 2 * (rows[0].nbytes + rows[0].nbytes // 2)
    half = (pool.shape.num_blocks - 1) // 2
    pairs = torch.stack([torch.arange(1, 129), torch.arange(1, 129) + half], dim=1)
    block_bytes = 2 * 2 * pairs.shape[0] * pool.key_caches[0][0].nbytes * pool.num_layers

    def write(call: int) -> None:
        layer = call % pool.num_layers
        write_kv(*rows, pool.key_caches[layer], pool.value_caches[layer], slots[call % 15], backend="cpu")

    def write_narrow(call: int) -> None:
        caches = narrow.key_caches[call % narrow.num_layers], narrow.value_caches[call % narrow.num_layers]
        write_kv(*rows, *caches, slots[call % 15], kv_scales=narrow.scales, backend="cpu")

    def copy(_: int) -> None:
        copy_blocks(pool.key_caches, pool.value_caches, pairs, backend="cpu")

    results: dict[str, list[float]] = {"write_kv": [], "write_kv_int8": [], "copy_blocks": []}
    for _ in range(rounds):
        plain = copy_bandwidth(pool.memory)
        results["write_kv"].append(row_bytes / seconds(write, range(3 * pool.num_layers)) / plain)
        narrow_time = seconds(write_narrow, range(3 * narrow.num_layers))
        results["write_kv_int8"].append(narrow_bytes / narrow_time / plain)
        results["copy_blocks"].append(block_bytes / seconds(copy, range(3)) / plain)
    for case, values in results.items():
        yield Result(case, f"{case}_bandwidth", statistics.median(values), "ratio", rounds)


def check_equal(output: Tensor, expected: Tensor) -> None:
    """Stops the bench if what it measures is wrong."""
    tolerance = 1e-3 if output.dtype is torch.float32 else 3e-2
    torch.testing.assert_close(output.float(), expected.float(), rtol=tolerance, atol=tolerance)


def all_cases() -> dict[str, Callable[[int, int], Iterator[Result]]]:
    """Returns the cases by name; each takes the number of rounds and the least bytes of its caches."""
    cases: dict[str, Callable[[int, int], Iterator[Result]]] = {}
    for name, shape in DECODES.items():
        cases[name] = lambda rounds, size, name=name, shape=shape: decode(name, shape, rounds, size)
    others = {"int8_vs_bf16": int8_vs_bf16, "shared_prefix_8192": shared_prefix, "prefill_2048": prefill}
    return {**cases, **others, "writes": writes}


def show(result: Result, as_json: bool) -> None:
    """Prints one line."""
    if as_json:
        print(
            json.dumps({"bench": "attention", **result.__dict__, "value": round(result.value, 3)}), flush=True
        )
    else:
        print(f"{result.metric:<40} {result.value:8.3f} {result.unit}", flush=True)


def main() -> None:
    cases = all_cases()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--cases", default=",".join(cases), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="the least size of a case's caches")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(cases)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in options.cases.split(","):
            for result in cases[name](options.rounds, int(options.gib * 2**30)):
                show(result, options.json)


if __name__ == "__main__":
    main()
