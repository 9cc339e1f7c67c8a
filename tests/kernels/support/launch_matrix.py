"""Calls of the launchers with tensors of production size that have no memory, for compiling ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from compile_ahead import compiling_for
from pairs import covering
from torch import Tensor

from pykv.kernels.arguments import Batch, Caches, Result, Rule
from pykv.kernels.attend import allocate_workspace, attend
from pykv.kernels.copy_blocks import launch_copy_blocks
from pykv.kernels.write_kv import launch_write_kv

NUM_BLOCKS = 200_000
NUM_ROWS = 8


@dataclass(frozen=True)
class Setting:
    """A model's attention, its cache and its options, and a call: a decode, or more tokens than rows."""

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
    log_sum_exp: bool = False
    table_rows: bool = True
    num_tokens: int = NUM_ROWS
    share_prefixes: bool = False


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


def compile_attention(target: str, setting: Setting) -> list[Any]:
    """Every kernel of one attention call: a decode where there are no more tokens than rows, else also a prefill."""
    num_tokens = setting.num_tokens
    caches = absent_caches(setting)
    num_heads = setting.num_kv_heads * setting.group
    query = absent(num_tokens, num_heads, setting.head_dim_k, dtype=setting.query)
    i32 = torch.int32
    batch = Batch(
        absent(256, 1024, dtype=i32),
        absent(NUM_ROWS, dtype=i32),
        absent(NUM_ROWS + 1, dtype=i32),
        absent(NUM_ROWS, dtype=i32) if setting.table_rows else None,
    )
    sinks = absent(num_heads, dtype=torch.float32) if setting.sinks else None
    rule = Rule(0.1, setting.window, setting.softcap, sinks)
    lse = absent(num_tokens, num_heads, dtype=torch.float32) if setting.log_sum_exp else None
    result = Result(query.new_empty(num_tokens, num_heads, setting.head_dim_v), lse)
    with compiling_for(target) as compiled:
        workspace = allocate_workspace(query, caches, batch, rule, share_prefixes=setting.share_prefixes)
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


# What the launchers compile different code for. The full product has 188,160 settings, a hundred hours a target.
FACTORS: dict[tuple[str, ...], tuple[tuple[Any, ...], ...]] = {
    ("query", "cache"): (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.int8),
        (torch.float16, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
    ),
    ("head_dim_k", "head_dim_v"): (
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (512, 512),
    ),
    ("num_kv_heads", "group"): ((16, 1), (8, 3), (8, 4), (4, 7), (8, 8), (1, 32)),
    ("block_size",): ((1,), (16,), (48,), (64,)),
    ("window",): ((0,), (4096,)),
    ("softcap",): ((0.0,), (30.0,)),
    ("sinks",): ((False,), (True,)),
    ("log_sum_exp",): ((False,), (True,)),
    ("table_rows",): ((True,), (False,)),
    ("num_tokens", "share_prefixes"): (
        (NUM_ROWS, False),
        (NUM_ROWS, True),
        (3 * NUM_ROWS, False),
        (4096, False),
        (4096, True),
    ),
}


def production_settings() -> list[Setting]:
    """Settings in which every value of each factor meets every value of each other one."""
    return [Setting(**values) for values in covering(FACTORS)]
