"""The Rust kernels for tensors on the CPU: hands over addresses, shapes and strides.

It uses as many threads as torch does (`torch.get_num_threads()`). What the index tensors hold is checked there, once
for each value that is read; block ids are copied before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pykv._core import CpuAttention
from pykv.attention.layer_cache import LayerCache
from pykv.attention.scales import KvScales

FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}

_attention = CpuAttention()


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    kv_scales: KvScales | None = None,
    log_sum_exp: Tensor | None = None,
    share_prefixes: bool = True,
    attention: CpuAttention = _attention,
) -> Tensor:
    """See `pykv.attention.paged_attention`.

    Args:
        share_prefixes: whether decodes whose tables begin with the same blocks read these together. It changes the
            time and no bit of the result.
        attention: the threads and scratch memory to use.
    """
    attention.paged_attention(
        view(query),
        view(key_cache),
        view(value_cache),
        view(out),
        (
            (block_tables.data_ptr(), block_tables.shape, block_tables.stride()),
            (seq_lens.data_ptr(), len(seq_lens)),
            (query_starts.data_ptr(), len(query_starts)),
            None if table_rows is None else (table_rows.data_ptr(), len(table_rows)),
        ),
        scale,
        window,
        softcap,
        None if sinks is None else (sinks.data_ptr(), len(sinks)),
        *scale_views(kv_scales),
        None if log_sum_exp is None else (log_sum_exp.data_ptr(), log_sum_exp.stride()),
        torch.get_num_threads(),
        share_prefixes,
    )
    return out


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: KvScales | None = None,
) -> None:
    """See `pykv.attention.write_kv`."""
    _attention.write_kv(
        view(key),
        view(value),
        view(key_cache),
        view(value_cache),
        (slot_mapping.data_ptr(), len(slot_mapping)),
        *scale_views(kv_scales),
        torch.get_num_threads(),
    )


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor) -> None:
    """See `pykv.attention.copy_blocks`."""
    caches = [view(cache) for cache in (*key_caches, *value_caches)]
    _attention.copy_blocks(caches, (pairs.data_ptr(), len(pairs)), torch.get_num_threads())


def transfer_blocks(sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor) -> None:
    """See `pykv.attention.transfer_blocks`."""
    from_views, to_views = (
        [view(part) for layer in layers for part in layer.parts()] for layers in (sources, targets)
    )
    _attention.transfer_blocks(from_views, to_views, (pairs.data_ptr(), len(pairs)), torch.get_num_threads())


def scale_views(kv_scales: KvScales | None) -> tuple[Any, Any]:
    """Returns the two numbers and the address and strides of the tensor, of which one is None."""
    if isinstance(kv_scales, Tensor):
        return None, (kv_scales.data_ptr(), kv_scales.stride())
    return kv_scales, None


def view(tensor: Tensor) -> tuple[int, Any, Any, int]:
    """Returns the address, shape, strides and format code of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), FORMATS[tensor.dtype]
