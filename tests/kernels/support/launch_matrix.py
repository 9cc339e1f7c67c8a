"""Calls of the launchers with tensors of production size that have no memory, for compiling ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from compile_ahead import compiling_for
from torch import Tensor

from pykv.kernels.arguments import Batch, Caches, Result, Rule
from pykv.kernels.attend import allocate_workspace, attend
from pykv.kernels.copy_blocks import launch_copy_blocks
from pykv.kernels.write_kv import launch_write_kv

NUM_BLOCKS = 200_000
NUM_ROWS = 8


@dataclass(frozen=True)
class Setting:
    """A model's attention, its cache and its options."""

    num_kv_heads: int = 8
    group: int = 4
    head_dim_k: int = 128
    head_dim_v: int = 128
    block_size: int = 16
    query: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


def absent(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def absent_caches(setting: Setting) -> Caches:
    heads, size = setting.num_kv_heads, setting.block_size
    border = heads * size * setting.head_dim_k
    pool = absent(NUM_BLOCKS, border + heads * size * setting.head_dim_v, dtype=setting.cache)
    key = pool[:, :border].unflatten(1, (heads, size, setting.head_dim_k))
    value = pool[:, border:].unflatten(1, (heads, size, setting.head_dim_v))
    scales = absent(NUM_BLOCKS, 2, heads, size, dtype=torch.float32) if setting.cache.itemsize == 1 else None
    return Caches(key, value, scales)


def compile_attention(
    target: str, setting: Setting, num_tokens: int, *, share_prefixes: bool = False
) -> list[Any]:
    """Every kernel of one attention call: a decode where there are no more tokens than rows, else also a prefill."""
    caches = absent_caches(setting)
    num_heads = setting.num_kv_heads * setting.group
    query = absent(num_tokens, num_heads, setting.head_dim_k, dtype=setting.query)
    i32 = torch.int32
    batch = Batch(
        absent(256, 1024, dtype=i32),
        absent(NUM_ROWS, dtype=i32),
        absent(NUM_ROWS + 1, dtype=i32),
        absent(NUM_ROWS, dtype=i32),
    )
    sinks = absent(num_heads, dtype=torch.float32) if setting.sinks else None
    rule = Rule(0.1, setting.window, setting.softcap, sinks)
    result = Result(query.new_empty(num_tokens, num_heads, setting.head_dim_v))
    with compiling_for(target) as compiled:
        workspace = allocate_workspace(query, caches, batch, rule, share_prefixes=share_prefixes)
        attend(query, caches, batch, rule, result, workspace)
    return compiled


def compile_moves(target: str, setting: Setting) -> list[Any]:
    """The write and the copy."""
    caches = absent_caches(setting)
    heads = setting.num_kv_heads
    key = absent(NUM_ROWS, heads, setting.head_dim_k, dtype=setting.query)
    value = absent(NUM_ROWS, heads, setting.head_dim_v, dtype=setting.query)
    with compiling_for(target) as compiled:
        launch_write_kv(key, value, caches, absent(NUM_ROWS, dtype=torch.int64))
        launch_copy_blocks(caches, caches, absent(4, 2, dtype=torch.int64))
    return compiled


def production_settings() -> Iterator[Setting]:
    """Models of many shapes, each with every cache type; plain and with all options in turn."""
    shapes = (
        Setting(),
        Setting(block_size=64),
        Setting(group=1, head_dim_k=64, head_dim_v=64),
        Setting(group=8, head_dim_k=64, head_dim_v=64, block_size=48),
        Setting(num_kv_heads=4, head_dim_k=256, head_dim_v=256),
        Setting(group=3, head_dim_k=96, head_dim_v=96),
        Setting(group=7, head_dim_k=80, head_dim_v=80, block_size=1),
        Setting(num_kv_heads=16, group=1, head_dim_k=192, head_dim_v=128),
        Setting(num_kv_heads=1, group=16, head_dim_k=512, head_dim_v=512),
    )
    types = (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
    )
    for number, (shape, (query, cache)) in enumerate(itertools.product(shapes, types)):
        full = (number + number // len(types)) % 2 == 1
        options = {"window": 4096, "softcap": 30.0, "sinks": True} if full else {}
        yield Setting(**{**vars(shape), "query": query, "cache": cache, **options})
