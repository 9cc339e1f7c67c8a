"""Checks of shapes, types, devices and strides: what is wrong, in which argument, and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_SCALE = 1e30
LEAST_SOFTCAP = 1e-6
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensor(
    name: str, tensor: Tensor, ndim: int, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Raises TypeError unless it is a tensor of `dtype`, ValueError unless it has `ndim` axes on `device`."""
    device_of(name, tensor)
    if dtype is not None and tensor.dtype is not dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {ndim} dimensions")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")


def device_of(name: str, tensor: Tensor) -> torch.device:
    """Returns the device of a tensor, or raises TypeError if it is none."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    return tensor.device


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless the shape is exactly `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape} = {meaning}")


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless neighbours along the last axis are neighbours in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous")


def check_activation(name: str, tensor: Tensor, device: torch.device) -> None:
    """Checks a [num_tokens, heads, head_dim] tensor of floats."""
    check_tensor(name, tensor, 3, None, device)
    if tensor.dtype not in ACTIVATION_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}")
    check_last_contiguous(name, tensor)


def check_caches(key_cache: Tensor, value_cache: Tensor, device: torch.device) -> None:
    """Checks a layer's caches [num_blocks, num_kv_heads, block_size, head_dim_k or _v] against each other."""
    check_tensor("key_cache", key_cache, 4, None, device)
    check_tensor("value_cache", value_cache, 4, key_cache.dtype, device)
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key_cache has shape {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)}; "
            "[num_blocks, num_kv_heads, block_size] must be equal"
        )
    if 0 in key_cache.shape or 0 in value_cache.shape:
        raise ValueError(
            f"key_cache has shape {tuple(key_cache.shape)} and value_cache "
            f"{tuple(value_cache.shape)}; no dimension may be 0"
        )
    check_last_contiguous("key_cache", key_cache)
    check_last_contiguous("value_cache", value_cache)


def check_heads(query: Tensor, key_cache: Tensor) -> None:
    """Checks that the query's heads and head size fit the cache."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, head_dim_k = key_cache.shape[1], key_cache.shape[3]
    if head_dim != head_dim_k:
        raise ValueError(f"query has head size {head_dim}; key_cache has {head_dim_k}")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads; it must be a multiple of key_cache's {num_kv_heads}")


def check_step(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    device: torch.device,
) -> None:
    """Checks the shapes and types of one step's index tensors."""
    check_tensor("block_tables", block_tables, 2, torch.int32, device)
    check_last_contiguous("block_tables", block_tables)
    check_index("seq_lens", seq_lens, torch.int32, device)
    num_rows = seq_lens.shape[0]
    check_index("query_starts", query_starts, torch.int32, device)
    check_shape("query_starts", query_starts, (num_rows + 1,), "(len(seq_lens) + 1,)")
    if table_rows is not None:
        check_index("table_rows", table_rows, torch.int32, device)
        check_shape("table_rows", table_rows, (num_rows,), "(len(seq_lens),)")
    elif block_tables.shape[0] < num_rows:
        raise ValueError(
            f"block_tables has {block_tables.shape[0]} rows; without table_rows it needs {num_rows}"
        )


def check_index(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Checks a contiguous 1-D tensor of whole numbers."""
    check_tensor(name, tensor, 1, dtype, device)
    check_last_contiguous(name, tensor)


def check_options(scale: float | None, window: int | None, softcap: float | None) -> None:
    """Checks the numbers that shape the softmax."""
    if scale is not None and not abs(scale) <= MOST_SCALE:
        raise ValueError(f"scale is {scale}; it must be from {-MOST_SCALE:g} to {MOST_SCALE:g}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window is {window!r}; it must be a whole number of tokens, 1 or more, or None")
    if softcap is not None and not LEAST_SOFTCAP <= softcap <= MOST_SCALE:
        raise ValueError(
            f"softcap is {softcap}; it must be from {LEAST_SOFTCAP:g} to {MOST_SCALE:g}, or None"
        )


def check_no_grad(name: str, tensor: Tensor) -> None:
    """Raises ValueError where autograd would expect a gradient: the backends give none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; call under torch.no_grad() or torch.inference_mode()")
