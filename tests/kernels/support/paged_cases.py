"""Batches of paged sequences in a poisoned pool, and their attention in float64.

Physical blocks are in shuffled order. Whatever no sequence owns (block 0, the spare block, the tails of last blocks,
table entries past a sequence) holds NaN or a block id that does not exist.
With PYKV_KERNEL_DEVICE=cuda in the environment everything is on the GPU, and the numbers are the same.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pykv.kernels.arguments import Batch, Caches, Rule

DEVICE = torch.device(os.environ.get("PYKV_KERNEL_DEVICE", "cpu"))
CACHE_TYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
MARGIN = 8  # elements after each head of an output that nobody may write
LARGEST_CODE = {"int8": 127.0, "e4m3": 448.0}
# Of the result, relative to its largest value, by the type of the queries.
# On a GPU a float32 product is three products of tf32 parts.
TOLERANCE = {
    torch.float32: 3e-6 if DEVICE.type == "cpu" else 3e-5,
    torch.float16: 1.5e-3,
    torch.bfloat16: 1.2e-2,
}


@dataclass(frozen=True)
class Case:
    """What a batch is made of; rows are (number of query tokens, number of keys)."""

    rows: tuple[tuple[int, int], ...] = ((1, 77), (1, 33), (1, 5))
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim_k: int = 64
    head_dim_v: int = 0  # 0: as head_dim_k
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache: str = "same"
    spare_tokens: int = 0  # query tokens of no row
    shuffle_rows: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.0  # 0: head_dim_k ** -0.5
    magnitude: float = 1.0
    seed: int = 0

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim_k


@dataclass
class PagedBatch:
    """A case laid out in memory; keys and values are each row's own, float64 [num_keys, num_kv_heads, head_dim]."""

    case: Case
    query: Tensor
    caches: Caches
    batch: Batch
    rule: Rule
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64."""
        out = torch.zeros(len(self.query), self.case.num_heads, self.case.value_dim, dtype=torch.float64)
        lse = torch.full((len(self.query), self.case.num_heads), -math.inf, dtype=torch.float64)
        begin = 0
        for (num_queries, num_keys), keys, values in zip(self.case.rows, self.keys, self.values, strict=True):
            tokens = slice(begin, begin + num_queries)
            begin += num_queries
            if num_queries and num_keys:
                out[tokens], lse[tokens] = attend_float64(self.query[tokens], keys, values, self.rule)
        return out, lse

    def empty_result(self) -> Tensor:
        """Where an output goes: NaN everywhere, and a margin after each head."""
        size = (len(self.query), self.case.num_heads, self.case.value_dim + MARGIN)
        return torch.full(size, math.nan, dtype=self.query.dtype)[..., :-MARGIN]

    def poison(self, caches: Caches) -> None:
        """Fills caches, as if nothing had been written yet."""
        for cache in (caches.key, caches.value):
            if self.case.cache == "same":
                cache.fill_(math.nan)
            else:
                cache.view(torch.uint8).fill_(0x7F)
        if caches.scales is not None:
            caches.scales.fill_(math.nan)


def attend_float64(query: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """One row: causal, the last query at the last key."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = (torch.arange(len(query)) + len(keys) - len(query))[:, None] - torch.arange(len(keys))
    seen = (distance >= 0) & ((distance < rule.window) if rule.window else True)
    scores = scores.masked_fill(~seen, -math.inf)
    column = torch.full_like(scores[..., :1], -math.inf)
    if rule.sinks is not None:
        column += math.inf
        column = rule.sinks.double()[:, None, None].expand_as(column)
    scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values), torch.logsumexp(scores, -1).T


def build(case: Case) -> PagedBatch:
    """Lays the case's sequences into a shuffled, poisoned pool."""
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu").to(DEVICE)

    def shuffled(count: int) -> list[int]:
        return [int(number) for number in torch.randperm(count, generator=generator, device="cpu")]

    needed = [-(-num_keys // case.block_size) for _, num_keys in case.rows]
    caches = empty_caches(case, sum(needed) + 2)
    order = [block + 1 for block in shuffled(sum(needed) + 1)]
    table_rows = list(range(len(case.rows)))
    if case.shuffle_rows:
        table_rows = [3 + row for row in shuffled(len(case.rows))]
    tables = torch.full((max(table_rows, default=0) + 2, max([*needed, 1]) + 1), -7, dtype=torch.int32)
    num_queries = torch.tensor([count for count, _ in case.rows])
    starts = torch.zeros(len(case.rows) + 1, dtype=torch.int32)
    starts[1:] = num_queries.cumsum(0)
    size = (int(num_queries.sum()) + case.spare_tokens, case.num_heads, case.head_dim_k)
    paged = PagedBatch(
        case=case,
        query=(random(*size) * case.magnitude).to(case.dtype),
        caches=caches,
        batch=Batch(
            tables,
            torch.tensor([num_keys for _, num_keys in case.rows], dtype=torch.int32),
            starts,
            torch.tensor(table_rows, dtype=torch.int32) if case.shuffle_rows else None,
        ),
        rule=Rule(
            case.scale or case.head_dim_k**-0.5,
            case.window,
            case.softcap,
            random(case.num_heads) if case.sinks else None,
        ),
    )
    paged.poison(caches)
    for row, (_, num_keys) in enumerate(case.rows):
        blocks = torch.tensor([order.pop() for _ in range(needed[row])], dtype=torch.int64)
        tables[table_rows[row], : len(blocks)] = blocks.int()
        position = torch.arange(num_keys)
        slots = blocks[position // case.block_size] * case.block_size + position % case.block_size
        for kind, owned in enumerate((paged.keys, paged.values)):
            width = case.value_dim if kind else case.head_dim_k
            tokens = random(num_keys, case.num_kv_heads, width).to(case.dtype)
            owned.append(fill(caches, kind, slots, tokens, case.cache))
    return paged


def share_keys(paged: PagedBatch, row: int, other: int, num_keys: int) -> None:
    """Makes another row begin with a row's blocks, whole ones; the blocks that it had there become NaN."""
    size, tables = paged.caches.block_size, paged.batch.block_tables
    if num_keys % size:
        raise ValueError(f"{num_keys} keys are no whole blocks of {size}")
    rows = paged.batch.table_rows
    source, target = (row, other) if rows is None else (int(rows[row]), int(rows[other]))
    columns = slice(0, num_keys // size)
    abandoned = tables[target, columns].long()
    for cache in (paged.caches.key, paged.caches.value):
        if paged.case.cache == "same":
            cache[abandoned] = math.nan
    tables[target, columns] = tables[source, columns]
    for owned in (paged.keys, paged.values):
        owned[other][:num_keys] = owned[row][:num_keys]


def empty_caches(case: Case, num_blocks: int) -> Caches:
    """Strided views of one tensor, K and V of a block adjacent."""
    dtype = CACHE_TYPES.get(case.cache, case.dtype)
    widths = (case.head_dim_k, case.value_dim)
    pool = torch.empty(num_blocks, case.num_kv_heads * case.block_size * sum(widths), dtype=dtype)
    border = case.num_kv_heads * case.block_size * widths[0]
    key = pool[:, :border].unflatten(1, (case.num_kv_heads, case.block_size, widths[0]))
    value = pool[:, border:].unflatten(1, (case.num_kv_heads, case.block_size, widths[1]))
    scales = None if case.cache == "same" else torch.empty(num_blocks, 2, case.num_kv_heads, case.block_size)
    return Caches(key, value, scales)


def fill(caches: Caches, kind: int, slots: Tensor, tokens: Tensor, cache: str) -> Tensor:
    """Writes tokens to their slots as the contract says; returns them as float64, as they can be read back."""
    target = caches.value if kind else caches.key
    blocks, offsets = slots // caches.block_size, slots % caches.block_size
    if caches.scales is None:
        target[blocks, :, offsets] = tokens
        return tokens.double()
    codes, scales = quantize(tokens.float(), cache)
    caches.scales[blocks, kind, :, offsets] = scales
    target.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
    return codes.float().double() * scales.double()[..., None]


def quantize(tokens: Tensor, cache: str) -> tuple[Tensor, Tensor]:
    """float32 [..., head_dim] to (codes, scales): each row's largest magnitude becomes the largest code."""
    largest = LARGEST_CODE[cache]
    magnitudes = tokens.abs().amax(-1)
    scales = magnitudes / torch.full_like(
        magnitudes, largest
    )  # a GPU's division by a plain number is not exact
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    ratio = (tokens / scales[..., None]).clamp(-largest, largest)
    return (ratio.round() if cache == "int8" else ratio).to(CACHE_TYPES[cache]), scales


def assert_margin_untouched(out: Tensor) -> None:
    """An output of `empty_result` was written inside its rows alone."""
    whole = out._base
    assert whole is not None
    assert whole.shape[-1] == out.shape[-1] + MARGIN
    assert whole[..., -MARGIN:].isnan().all()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every element within the tolerance, relative to the largest expected one; NaN never passes."""
    assert actual.isfinite().all()
    limit = tolerance * max(1.0, float(expected.abs().max()))
    assert float((actual.double() - expected).abs().max()) <= limit
