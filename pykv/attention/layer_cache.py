"""What a layer keeps of a pool's blocks: the unit in which blocks move from pool to pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps of all blocks.

    Attributes:
        key, value: [num_blocks, num_kv_heads, block_size, head_dim_k or _v], the last dimension contiguous.
        scales: float32 [num_blocks, 2, num_kv_heads, block_size], where each row has one.
    """

    key: Tensor
    value: Tensor
    scales: Tensor | None = None

    def parts(self) -> Iterator[Tensor]:
        """Everything that is moved with a block, each [num_blocks, ...] in four dimensions."""
        yield self.key
        yield self.value
        if self.scales is not None:
            yield self.scales
