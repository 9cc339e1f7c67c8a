"""Paged attention problems of any size on the device, and what their results should be, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pykv.kernels import operators
from pykv.kernels.arguments import Batch, Caches, Rule
from pykv.kernels.attend import allocate_workspace

__all__ = ["CACHE_TYPES", "PagedProblem", "Shape", "build_problem"]

CACHE_TYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Shape:
    """A batch of rows, each (number of query tokens, number of keys), of one model."""

    rows: tuple[tuple[int, int], ...]
    cache: str = "bf16"
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_keys(self) -> int:
        return sum(num_keys for _, num_keys in self.rows)

    @property
    def num_queries(self) -> int:
        return sum(num_queries for num_queries, _ in self.rows)

    @property
    def bytes_read(self) -> int:
        """The least that a decode must read: every key and value, and their scales."""
        element = CACHE_TYPES[self.cache].itemsize
        scales = 4 if element == 1 else 0
        return 2 * self.num_keys * self.num_kv_heads * (self.head_dim * element + scales)

    @property
    def operations(self) -> int:
        """Floating-point operations of causal attention, two products of what is seen."""
        seen = sum(queries * (keys - queries) + queries * (queries + 1) // 2 for queries, keys in self.rows)
        return 4 * seen * self.num_heads * self.head_dim


@dataclass
class PagedProblem:
    """A shape laid out in a pool whose free blocks hold NaN; physical blocks are shuffled."""

    shape: Shape
    query: Tensor
    caches: Caches
    batch: Batch
    rule: Rule
    out: Tensor
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        self._workspace = allocate_workspace(
            self.query, self.caches, self.batch, self.rule, share_prefixes=self.share_prefixes
        )

    def attend(self) -> Tensor:
        """The call that is measured: nothing is allocated, nothing read back."""
        workspace = self._workspace
        operators.paged_attention(
            self.out,
            None,
            None if workspace is None else workspace.out,
            None if workspace is None else workspace.lse,
            self.query,
            self.caches.key,
            self.caches.value,
            self.caches.scales,
            self.batch.block_tables,
            self.batch.seq_lens,
            self.batch.query_starts,
            None,
            None,
            self.rule.scale,
            self.rule.window,
            self.rule.softcap,
            None if workspace is None else workspace.prefixes,
            0 if workspace is None else workspace.num_prefix_splits,
        )
        return self.out

    @property
    def num_splits(self) -> int:
        return 1 if self._workspace is None else self._workspace.num_splits

    def contiguous(self, row: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one row as the cache holds them, float64 [num_keys, num_kv_heads, head_dim]."""
        num_keys = self.shape.rows[row][1]
        position = torch.arange(num_keys, device=self.query.device)
        size = self.caches.block_size
        blocks = self.batch.block_tables[row].long()[position // size]
        found = []
        for kind, cache in enumerate((self.caches.key, self.caches.value)):
            part = cache[blocks, :, position % size].to(torch.float32).double()
            if self.caches.scales is not None:
                part *= self.caches.scales[blocks, kind, :, position % size].double()[..., None]
            found.append(part)
        return found[0], found[1]

    def relative_error(self, rows: Sequence[int]) -> float:
        """The norm of the difference from float64 over the norm of the result, of the last call; NaN never passes."""
        difference = reference = torch.zeros((), dtype=torch.float64, device=self.query.device)
        starts = self.batch.query_starts.tolist()
        for row in rows:
            tokens = slice(max(starts[row], starts[row + 1] - 256), starts[row + 1])
            expected = attend_float64(self.query[tokens], *self.contiguous(row), self.rule.scale)
            difference = difference + (self.out[tokens].double() - expected).square().sum()
            reference = reference + expected.square().sum()
        return float((difference / reference).sqrt())


def attend_float64(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last queries of one row, causal."""
    group = query.shape[1] // keys.shape[1]
    grouped = query.double().unflatten(1, (keys.shape[1], group))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    positions = torch.arange(len(keys), device=query.device)
    seen = positions <= positions[len(keys) - len(query) :, None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)


def build_problem(shape: Shape, device: str, seed: int = 0) -> PagedProblem:
    """Writes random keys and values through the write kernel, row by row."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = [-(-num_keys // shape.block_size) for _, num_keys in shape.rows]
    order = (torch.randperm(sum(blocks), generator=generator, device=device) + 1).int()
    caches = poisoned_caches(shape, sum(blocks) + 2, device)
    tables = torch.zeros(len(shape.rows), max(blocks), dtype=torch.int32, device=device)
    used = 0
    for row, (_, num_keys) in enumerate(shape.rows):
        tables[row, : blocks[row]] = order[used : used + blocks[row]]
        used += blocks[row]
        position = torch.arange(num_keys, device=device)
        slots = (
            tables[row].long()[position // shape.block_size] * shape.block_size + position % shape.block_size
        )
        size = (num_keys, shape.num_kv_heads, shape.head_dim)
        key, value = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(2))
        operators.write_kv(key, value, caches.key, caches.value, caches.scales, slots)
    counts = torch.tensor([count for count, _ in shape.rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]).to(device)
    query_size = (shape.num_queries, shape.num_heads, shape.head_dim)
    query = torch.randn(query_size, generator=generator, device=device).bfloat16()
    lengths = torch.tensor([num_keys for _, num_keys in shape.rows], dtype=torch.int32).to(device)
    out = torch.full_like(query, torch.nan)
    return PagedProblem(shape, query, caches, Batch(tables, lengths, starts), Rule(shape.head_dim**-0.5), out)


def poisoned_caches(shape: Shape, num_blocks: int, device: str) -> Caches:
    """K and V of a block adjacent; what nobody writes is NaN."""
    dtype = CACHE_TYPES[shape.cache]
    size = (num_blocks, 2, shape.num_kv_heads, shape.block_size)
    pool = torch.empty(*size, shape.head_dim, dtype=dtype, device=device)
    if dtype.itemsize == 1:
        pool.view(torch.uint8).fill_(0x7F)
        return Caches(pool[:, 0], pool[:, 1], torch.full(size, torch.nan, device=device))
    pool.fill_(torch.nan)
    return Caches(pool[:, 0], pool[:, 1])
