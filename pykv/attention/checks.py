"""Checks of shapes, types, devices, strides and memory: what is wrong, in which argument, and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pykv.attention import overlap
from pykv.field_checks import shown

MOST_SCALE = 1e30
LEAST_SOFTCAP = 1e-6
MOST_WINDOW = 2**31 - 1
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED_DTYPES = (*ACTIVATION_DTYPES, torch.int8, torch.float8_e4m3fn, torch.uint8)


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
    """Returns the device of a tensor, or raises TypeError if it is none, or has no strides."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {shown(tensor)}; it must be a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"{name} is a tensor of layout {tensor.layout}; it must be a dense one")
    return tensor.device


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless the shape is exactly `shape`."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape} = {meaning}")


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless neighbours along the last axis are neighbours in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous")


def check_activation(name: str, tensor: Tensor, device: torch.device) -> None:
    """Checks a [num_tokens, heads, head_dim] tensor of floats."""
    check_tensor(name, tensor, 3, None, device)
    if tensor.dtype not in ACTIVATION_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed are {allowed}")
    check_last_contiguous(name, tensor)


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    device: torch.device,
    key_name: str = "key_cache",
    value_name: str = "value_cache",
) -> None:
    """Checks a layer's caches [num_blocks, num_kv_heads, block_size, head_dim_k or _v] against each other."""
    check_tensor(key_name, key_cache, 4, None, device)
    check_tensor(value_name, value_cache, 4, key_cache.dtype, device)
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"{key_name} has shape {tuple(key_cache.shape)} and {value_name} {tuple(value_cache.shape)}; "
            "[num_blocks, num_kv_heads, block_size] must be equal"
        )
    if 0 in key_cache.shape or 0 in value_cache.shape:
        raise ValueError(
            f"{key_name} has shape {tuple(key_cache.shape)} and {value_name} "
            f"{tuple(value_cache.shape)}; no dimension may be 0"
        )
    check_last_contiguous(key_name, key_cache)
    check_last_contiguous(value_name, value_cache)


def check_moved(name: str, cache: Tensor) -> None:
    """Raises TypeError unless blocks of this type can be moved: numbers, or bytes that only their format reads."""
    device_of(name, cache)
    if cache.dtype not in MOVED_DTYPES:
        raise TypeError(f"{name} has dtype {cache.dtype}: allowed are {', '.join(map(str, MOVED_DTYPES))}")


def widest_dtype(caches: Iterable[Tensor]) -> torch.dtype:
    """Returns float64 if one of the caches has it, which not every backend serves; else the first one's dtype."""
    dtypes = [cache.dtype for cache in caches]
    return torch.float64 if torch.float64 in dtypes else dtypes[0] if dtypes else torch.float32


def check_pairs_of_blocks(pairs: Tensor) -> torch.device:
    """Checks the shape and type of [num_pairs, 2] block ids; returns their device."""
    device = device_of("pairs", pairs)
    check_tensor("pairs", pairs, 2, torch.int64, device)
    check_shape("pairs", pairs, (pairs.shape[0], 2), "(num_pairs, 2)")
    check_last_contiguous("pairs", pairs)
    return device


def check_as_many(name: str, layers: Sequence[object], other_name: str, others: Sequence[object]) -> None:
    """Raises ValueError unless two sequences have as many layers."""
    if len(layers) != len(others):
        raise ValueError(
            f"{name} has {len(layers)} layers; {other_name} has {len(others)}; they must have as many"
        )


def check_sequence(name: str, value: object) -> None:
    """Raises TypeError unless it has an entry for each layer."""
    is_stack = isinstance(value, Tensor) and value.ndim == 5
    if not is_stack and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        raise TypeError(f"{name} is {shown(value)}; it must be a sequence with an entry for each layer")


def check_writable(name: str, tensor: Tensor) -> None:
    """Raises ValueError where two elements of a tensor that is written may be the same memory."""
    if not torch.compiler.is_compiling() and overlap.repeats_itself(tensor):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it is written, so no two elements "
            "may be the same memory"
        )


def check_apart(names: Sequence[str], tensors: Sequence[Tensor | None], num_written: int) -> None:
    """Raises ValueError where one of the first `num_written` tensors may share memory with another, or with itself."""
    if torch.compiler.is_compiling():  # there are no addresses yet
        return
    for name, tensor in zip(names[:num_written], tensors, strict=False):
        if tensor is not None:
            check_writable(name, tensor)
    found = overlap.clash(tensors, num_written)
    if found is not None:
        written, other = (names[place] for place in found)
        raise ValueError(f"{written} shares memory with {other}; it must have memory of its own")


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


def checked_scale(scale: object, head_dim: int) -> float:
    """Returns the factor of the scores: `head_dim ** -0.5` where none is given."""
    return head_dim**-0.5 if scale is None else _number("scale", scale, -MOST_SCALE, "")


def checked_softcap(softcap: object) -> float | None:
    """Returns the bound of the scores, or None."""
    return None if softcap is None else _number("softcap", softcap, LEAST_SOFTCAP, ", or None")


def checked_window(window: object) -> int | None:
    """Returns the tokens that a query sees, or None."""
    if window is None:
        return None
    if isinstance(window, numbers.Integral) and not isinstance(window, bool):
        count = int(window)
        if 1 <= count <= MOST_WINDOW:
            return count
    kind = ValueError if is_number(window) else TypeError
    raise kind(
        f"window is {shown(window)}; it must be a whole number of tokens from 1 to {MOST_WINDOW}, or None"
    )


def is_number(value: object) -> bool:
    """Whether it is a real number, numpy's included; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_float(value: object) -> float:
    """Returns a number as a float, infinity where it is too large for one."""
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


def _number(name: str, value: object, least: float, otherwise: str) -> float:
    allowed = f"it must be from {least:g} to {MOST_SCALE:g}{otherwise}"
    if not is_number(value):
        raise TypeError(f"{name} is {shown(value)}; {allowed}")
    number = as_float(value)
    if not least <= number <= MOST_SCALE:
        raise ValueError(f"{name} is {shown(value)}; {allowed}")
    return number


def check_no_grad(name: str, tensor: Tensor) -> None:
    """Raises ValueError where autograd would expect a gradient: the backends give none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient; call under torch.no_grad() or torch.inference_mode()")
