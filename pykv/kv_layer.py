"""What one attention layer keeps for a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pykv.kv_format import ElementType, KvFormat, kv_format_of

__all__ = ["CacheType", "Config", "KvLayer", "Storage"]

Storage = Literal["expanded", "latent"]

CacheType = str | ElementType | KvFormat
"""How a cache stores its numbers: a `KvFormat`, its name, the name of a dtype, or a dtype object."""

Config = Mapping[str, Any] | object


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one attention layer keeps for a token.

    Attributes:
        num_kv_heads, head_dim_k, head_dim_v: a key is [num_kv_heads, head_dim_k], a value [num_kv_heads,
            head_dim_v]. A latent layer has one head and head_dim_v 0: its values are a part of its keys.
        window: the number of last tokens that a query sees, its own included; None: all.
        reads_layer: the index of the earlier layer whose keys and values this one reads instead of storing
            any; None: it stores its own.
    """

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    reads_layer: int | None = None

    @property
    def elements_per_token(self) -> int:
        """The elements that this layer stores for one token."""
        if self.reads_layer is not None:
            return 0
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v)

    def bytes_per_token(self, dtype: CacheType) -> int:
        """The bytes that this layer stores for one token, scales included."""
        if self.reads_layer is not None:
            return 0
        rows = (kv_format_of(dtype).row_bytes(size) for size in (self.head_dim_k, self.head_dim_v) if size)
        return self.num_kv_heads * sum(rows)
