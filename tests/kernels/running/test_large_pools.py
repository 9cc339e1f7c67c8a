"""Pools past 2^31 elements: the same sequence in the lowest and in the highest blocks.

The pools are never touched as a whole, so they take address space and no memory.
"""

from __future__ import annotations

import dataclasses

import torch
from address_space import lazy_zeros
from paged_cases import Case, build

from pykv.kernels.arguments import Batch, Caches, Result
from pykv.kernels.attend import allocate_workspace, attend
from pykv.kernels.copy_blocks import launch_copy_blocks
from pykv.kernels.write_kv import launch_write_kv

CASE = Case(
    rows=((1, 90), (20, 90)), num_heads=2, head_dim_k=128, block_size=64, cache="int8", dtype=torch.float16
)
NUM_BLOCKS = (1 << 31) // (2 * 2 * 64 * 128) + 5
HIGHEST = NUM_BLOCKS - 2  # of it and the next block, every element is past 2^31


def test_high_blocks_are_written_copied_and_read_like_low_ones() -> None:
    pool = lazy_zeros(NUM_BLOCKS, 2, 2, 64, 128, dtype=torch.int8)
    scales = lazy_zeros(NUM_BLOCKS, 2, 2, 64, dtype=torch.float32)
    caches = Caches(pool[:, 0], pool[:, 1], scales)
    assert HIGHEST * pool.stride(0) > 1 << 31
    key, value = torch.randn(90, 2, 128).half(), torch.randn(90, 2, 128).half()
    position = torch.arange(90)
    low, high = torch.tensor([2, 1]), torch.tensor([HIGHEST, HIGHEST + 1])
    for blocks in (low, high):
        launch_write_kv(key, value, caches, blocks[position // 64] * 64 + position % 64)
    for number in (0, 1):
        assert torch.equal(pool[high[number]], pool[low[number]])
        assert torch.equal(scales[high[number]], scales[low[number]])
    assert pool[low].any()
    wrapped = HIGHEST - (1 << 31) // pool.stride(0) if HIGHEST * pool.stride(0) > 1 << 31 else 0
    assert not pool[[wrapped + 3, 0]].any()
    launch_copy_blocks(caches, caches, torch.tensor([[HIGHEST, NUM_BLOCKS - 3]]))
    assert torch.equal(pool[NUM_BLOCKS - 3], pool[low[0]])
    paged = build(dataclasses.replace(CASE, block_size=64))
    results = []
    for blocks in (low, high):
        batch = Batch(blocks.int().expand(2, 2).contiguous(), paged.batch.seq_lens, paged.batch.query_starts)
        out = paged.empty_result()
        workspace = allocate_workspace(paged.query, caches, batch, paged.rule)
        attend(paged.query, caches, batch, paged.rule, Result(out), workspace)
        results.append(out)
    assert torch.equal(*results)
    assert results[0].isfinite().all()
