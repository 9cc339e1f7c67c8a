"""The arguments of an attention launch in groups, as the launchers hand them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pykv.kernels.cache_format import CacheFormat, as_read, as_written, cache_format
from pykv.kernels.target import Target

__all__ = ["Batch", "Caches", "Result", "Rule", "Workspace", "arithmetic_type", "padded", "query_rows"]


@dataclass(frozen=True, slots=True)
class Caches:
    """One layer's paged keys and values.

    Attributes:
        key, value: [num_blocks, num_kv_heads, block_size, head_dim_k or _v], any strides but a contiguous last one.
        scales: float32 [num_blocks, 2, num_kv_heads, block_size], keys' then values', for 8-bit caches; else None.
    """

    key: Tensor
    value: Tensor
    scales: Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim_k(self) -> int:
        return self.key.shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.value.shape[3]

    def format(self, target: Target) -> CacheFormat:
        """The code of these caches on a target."""
        return cache_format(self.key, target)

    def as_read(self, form: CacheFormat) -> tuple[Tensor, Tensor]:
        """Keys and values as the attention kernels read them."""
        return as_read(self.key, form), as_read(self.value, form)

    def as_written(self, form: CacheFormat) -> tuple[Tensor, Tensor]:
        """Keys and values as kernels store into them."""
        return as_written(self.key, form), as_written(self.value, form)

    def as_moved(self) -> tuple[Tensor, Tensor]:
        """Keys and values as a type that every target can load and store."""
        fp8 = self.key.dtype == torch.float8_e4m3fn
        return self.as_written(CacheFormat.E4M3_SOFTWARE if fp8 else CacheFormat.SAME)

    def scale_strides(self) -> tuple[int, int, int, int]:
        """The strides of the scales, zeros where there are none."""
        if self.scales is None:
            return 0, 0, 0, 0
        block, kind, head, slot = self.scales.stride()
        return block, kind, head, slot


@dataclass(frozen=True, slots=True)
class Batch:
    """Which tokens belong to which sequence, and where its blocks are.

    Attributes:
        block_tables: int32 [num_table_rows, num_columns], last dimension contiguous.
        seq_lens: int32 [num_rows], keys of each batch row, its new tokens included; 0 for padding.
        query_starts: int32 [num_rows + 1]; row i computes the tokens [query_starts[i], query_starts[i + 1]).
        table_rows: int32 [num_rows], the table row of each batch row; None: row i.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    table_rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_columns(self) -> int:
        return self.block_tables.shape[1]


@dataclass(frozen=True, slots=True)
class Rule:
    """What shapes the softmax.

    Attributes:
        scale: factor of the scores.
        window: tokens that a query sees, itself included; 0: all.
        softcap: scores become softcap * tanh(score / softcap); 0: as they are.
        sinks: float32 [num_heads], or None.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a launch fills.

    Attributes:
        out: [num_tokens, num_heads, head_dim_v], last dimension contiguous.
        lse: float32 [num_tokens, num_heads], contiguous: the natural log of the summed weights, sink included, -inf
            where nothing was seen; None: not wanted.
    """

    out: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the programs of a decode leave their parts; never read before it is written.

    Attributes:
        out: float32 [num_items, num_heads, num_parts, head_dim_v], contiguous: first a part for each split of a
            sequence's own keys, then one for each split of a shared prefix.
        lse: float32 [num_items, num_heads, num_parts], contiguous, in base 2.
        prefixes: int32 [3, num_rows], contiguous, which decodes read a prefix together; None: each reads alone.
        num_prefix_splits: the last so many parts are of the prefix; 0 without `prefixes`.
    """

    out: Tensor
    lse: Tensor
    prefixes: Tensor | None = None
    num_prefix_splits: int = 0

    @property
    def num_parts(self) -> int:
        return self.lse.shape[2]

    @property
    def num_splits(self) -> int:
        """Into how many parts the keys that a sequence reads alone are cut."""
        return self.num_parts - self.num_prefix_splits

    @property
    def shared_lengths(self) -> Tensor | None:
        """int32 [num_rows]: how many keys of each row are read together with other rows'."""
        return None if self.prefixes is None else self.prefixes[2]


def padded(size: int) -> int:
    """The least power of two that holds `size` and whose halves a matrix product still takes."""
    return max(32, 1 << (size - 1).bit_length())


def query_rows(group: int) -> int:
    """The rows of a matrix product that hold one token's query heads of one KV head."""
    return max(16, 1 << (group - 1).bit_length())


def arithmetic_type(query: Tensor, form: CacheFormat) -> torch.dtype:
    """What products are computed in: the queries' type, or float16 for 8-bit caches (exact for their codes)."""
    if form is CacheFormat.SAME or query.dtype == torch.float32:
        return query.dtype
    return torch.float16
