"""What a layer keeps of a pool's blocks: the unit in which blocks move from pool to pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pykv.attention.scales import KvScales


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps of all blocks.

    Attributes:
        key, value: [num_blocks, num_kv_heads, block_size, head_dim_k or _v], the last dimension contiguous; uint8 where
            only the format can read the rows.
        scales: of caches of 8 bits, as `paged_attention` takes them: float32 [num_blocks, 2, num_kv_heads, block_size],
            or two numbers; of others None.
    """

    key: Tensor
    value: Tensor
    scales: KvScales | None = None

    @property
    def row_scales(self) -> Tensor | None:
        """The scales that move with the blocks."""
        return self.scales if isinstance(self.scales, Tensor) else None

    def parts(self) -> Iterator[Tensor]:
        """Everything that is moved with a block, each [num_blocks, ...] in four dimensions."""
        yield self.key
        yield self.value
        if self.row_scales is not None:
            yield self.row_scales

    def as_numbers(self) -> LayerCache:
        """The layer as every backend moves it."""
        return LayerCache(as_numbers(self.key), as_numbers(self.value), self.scales)


def as_numbers(cache: Tensor) -> Tensor:
    """Bytes that only a format can read as int8, which every backend moves; other caches as they are."""
    return cache.view(torch.int8) if cache.dtype is torch.uint8 else cache
