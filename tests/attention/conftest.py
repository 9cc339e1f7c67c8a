"""Batches of paged sequences for the attention tests, and attention one query at a time in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """What a test batch is made of; rows are (number of query tokens, sequence length)."""

    rows: tuple[tuple[int, int], ...] = ((1, 13), (5, 9), (1, 1))
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim_k: int = 16
    head_dim_v: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Batch:
    """One step's tensors, and each sequence's own keys and values [seq_len, num_kv_heads, head_dim]."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def step(self) -> dict[str, Tensor]:
        return {
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "query_starts": self.query_starts,
        }


def build_batch(shape: Shape, content: Callable[..., Tensor] = torch.randn) -> Batch:
    """Lays sequences into a shuffled pool; every slot that no sequence owns holds NaN or infinity."""
    generator = torch.Generator().manual_seed(shape.seed)
    needed = [-(-length // shape.block_size) for _, length in shape.rows]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.full((len(shape.rows), max([*needed, 1]) + 1), -7, dtype=torch.int32)
    caches = [poisoned_cache(shape, num_blocks, dim) for dim in (shape.head_dim_k, shape.head_dim_v)]
    keys, values = [], []
    for row, (_, length) in enumerate(shape.rows):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for cache, owned in zip(caches, (keys, values), strict=True):
            size = (length, shape.num_kv_heads, cache.shape[3])
            owned.append(content(size, generator=generator).to(shape.dtype))
            fill_sequence(cache, blocks, owned[-1])
    num_queries = torch.tensor([count for count, _ in shape.rows])
    size = (int(num_queries.sum()), shape.num_heads, shape.head_dim_k)
    starts = torch.zeros(len(shape.rows) + 1, dtype=torch.int32)
    starts[1:] = num_queries.cumsum(0)
    return Batch(
        query=content(size, generator=generator).to(shape.dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        seq_lens=torch.tensor([length for _, length in shape.rows], dtype=torch.int32),
        query_starts=starts,
        keys=keys,
        values=values,
    )


def poisoned_cache(shape: Shape, num_blocks: int, head_dim: int) -> Tensor:
    """Returns a cache that holds NaN, infinity and minus infinity in turn."""
    cache = torch.full((num_blocks, shape.num_kv_heads, shape.block_size, head_dim), math.nan)
    cache.view(-1)[1::3] = math.inf
    cache.view(-1)[2::3] = -math.inf
    return cache.to(shape.dtype)


def fill_sequence(cache: Tensor, blocks: list[int], tokens: Tensor) -> None:
    """Writes a sequence's tokens [seq_len, num_kv_heads, head_dim] into its blocks."""
    positions = torch.arange(len(tokens))
    ids = torch.tensor(blocks, dtype=torch.int64)[positions // cache.shape[2]]
    cache[ids, :, positions % cache.shape[2]] = tokens


def float64_attention(
    batch: Batch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with one query token at a time, in float64, from the sequences' own keys and values."""
    num_tokens, num_heads, head_dim = batch.query.shape
    out = torch.zeros(num_tokens, num_heads, batch.value_cache.shape[3], dtype=torch.float64)
    group = num_heads // batch.key_cache.shape[1]
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.seq_lens.tolist()):
        keys = batch.keys[row].double().repeat_interleave(group, dim=1)
        values = batch.values[row].double().repeat_interleave(group, dim=1)
        for token in range(starts[row], starts[row + 1] if length else starts[row]):
            position = length - (starts[row + 1] - token)
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = torch.einsum("hd,khd->hk", batch.query[token].double(), keys[seen])
            scores = scores * (head_dim**-0.5 if scale is None else scale)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : keys[seen].shape[0]]
            out[token] = torch.einsum("hk,khd->hd", weights, values[seen])
    return out


class Paging:
    """The helpers above, as a fixture: test modules are not a package."""

    shape = Shape
    build = staticmethod(build_batch)
    expected = staticmethod(float64_attention)


@pytest.fixture
def paging() -> type[Paging]:
    return Paging


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Lets torch, and so the CPU backend, use one thread and then two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
