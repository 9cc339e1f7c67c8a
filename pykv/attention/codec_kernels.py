"""Attention over caches whose rows only their format can read: decoded by it, then computed by the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pykv.attention import torch_backend
from pykv.attention.layer_cache import LayerCache
from pykv.kv_format import CodecFormat

__all__ = ["CodecKernels"]


class CodecKernels:
    """A backend for one format; its caches are uint8 [num_blocks, num_kv_heads, block_size, row_bytes]."""

    def __init__(self, format: CodecFormat) -> None:
        self._format = format

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **extras: Any,
    ) -> None:
        """See `pykv.attention.write_kv`."""
        codes = self._format.encode(key), self._format.encode(value)
        torch_backend.write_kv(*codes, key_cache, value_cache, slot_mapping, **extras)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_tables: Tensor,
        table_rows: Tensor | None,
        out: Tensor,
        **others: Any,
    ) -> Tensor:
        """See `pykv.attention.paged_attention`.

        Every block that the tables name is decoded once; what stands behind a sequence's length may name any.
        """
        tables = block_tables if table_rows is None else block_tables[table_rows.long()]
        blocks, own_tables = torch.unique(tables.clamp(0, key_cache.shape[0] - 1), return_inverse=True)
        keys = self._format.decode(key_cache[blocks.long()], query.shape[2])
        values = self._format.decode(value_cache[blocks.long()], out.shape[2])
        return torch_backend.paged_attention(
            query, keys, values, block_tables=own_tables, table_rows=None, out=out, **others
        )

    def copy_blocks(
        self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor
    ) -> None:
        """See `pykv.attention.copy_blocks`."""
        torch_backend.copy_blocks(key_caches, value_caches, pairs)

    def transfer_blocks(
        self, sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor
    ) -> None:
        """See `pykv.attention.transfer_blocks`."""
        torch_backend.transfer_blocks(sources, targets, pairs)
