"""Prefill against float64, in a poisoned pool, alone and beside decodes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paged_cases import TOLERANCE, Case, PagedBatch, assert_margin_untouched, assert_near, build

from pykv.kernels.arguments import Batch, Result
from pykv.kernels.attend import allocate_workspace, attend
from pykv.kernels.prefill import launch_prefill
from pykv.kernels.tile_config import TileConfig

MIXED = ((19, 70), (1, 45), (0, 0), (33, 33), (1, 0), (5, 0))
CASES = {
    "plain": Case(rows=((50, 90), (33, 33))),
    "mixed with decodes, padding and empty rows": Case(rows=MIXED, spare_tokens=3),
    "ratio 1, head 80, block 5": Case(rows=((30, 61),), num_heads=2, head_dim_k=80, block_size=5),
    "ratio 3, head 96, block 48, window": Case(
        rows=((40, 100), (20, 20)), num_heads=6, head_dim_k=96, block_size=48, window=24
    ),
    "ratio 7, head 128, block 1, cap, sinks": Case(
        rows=((12, 40),), num_heads=14, head_dim_k=128, block_size=1, softcap=3.0, sinks=True
    ),
    "head 256, block 64": Case(rows=((20, 130),), head_dim_k=256, block_size=64),
    "keys wider than values, scattered rows": Case(
        rows=MIXED, head_dim_k=48, head_dim_v=32, shuffle_rows=True
    ),
    "everything": Case(
        rows=MIXED,
        head_dim_k=40,
        block_size=17,
        window=16,
        softcap=2.0,
        sinks=True,
        shuffle_rows=True,
        spare_tokens=1,
    ),
}


def attended(paged: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    result = Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    workspace = allocate_workspace(paged.query, paged.caches, paged.batch, paged.rule)
    attend(paged.query, paged.caches, paged.batch, paged.rule, result, workspace)
    assert_margin_untouched(result.out)
    assert result.lse is not None
    return result.out, result.lse


@pytest.mark.parametrize("name", CASES)
def test_a_batch_equals_float64(name: str) -> None:
    paged = build(CASES[name])
    out, lse = attended(paged)
    expected_out, expected_lse = paged.expected()
    assert_near(out, expected_out, TOLERANCE[torch.float32])
    seen = expected_lse > -math.inf
    assert_near(lse[seen], expected_lse[seen], TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", ["same", "int8", "e4m3"])
def test_every_cache_type_equals_float64(cache: str, dtype: torch.dtype) -> None:
    paged = build(dataclasses.replace(CASES["everything"], cache=cache, dtype=dtype))
    assert_near(attended(paged)[0], paged.expected()[0], TOLERANCE[dtype])


def test_chunks_of_any_size_give_what_one_chunk_gives() -> None:
    whole = build(Case(rows=((50, 50),), num_heads=4))
    expected, _ = attended(whole)
    for size in (1, 7, 16, 17):
        starts = torch.tensor([*range(0, 50, size), 50], dtype=torch.int32)
        same_table = torch.zeros(len(starts) - 1, dtype=torch.int32)
        chunks = Batch(whole.batch.block_tables, starts[1:].clone(), starts, same_table)
        out, _ = attended(dataclasses.replace(whole, batch=chunks))
        assert_near(out, expected.double(), TOLERANCE[torch.float32])


def test_a_chunk_of_three_after_ten_keys_sees_the_cached_ones() -> None:
    paged = build(Case(rows=((3, 10),), block_size=4, num_heads=2, head_dim_k=32))
    paged.query.zero_()  # equal weights: the output is the mean of what is seen
    out, _ = attended(paged)
    for index in range(3):
        assert_near(out[index], paged.values[0][: 8 + index].mean(0), TOLERANCE[torch.float32])


@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 15, 16, 17])
def test_a_window_of_eight_is_exact_around_its_edges(length: int) -> None:
    paged = build(
        Case(rows=((length, length), (1, length)), block_size=3, window=8, num_heads=2, head_dim_k=32)
    )
    assert_near(attended(paged)[0], paged.expected()[0], TOLERANCE[torch.float32])


def test_prefill_leaves_rows_of_one_token_alone_and_fills_the_rest() -> None:
    paged = build(Case(rows=((1, 20), (3, 9), (1, 33), (0, 4), (2, 0)), spare_tokens=2))
    out = paged.empty_result()
    launch_prefill(paged.query, paged.caches, paged.batch, paged.rule, Result(out), TileConfig(32, 32, 4, 2))
    assert out[[0, 4]].isnan().all()
    rest = [1, 2, 3, 5, 6, 7, 8]
    assert_near(out[rest], paged.expected()[0][rest], TOLERANCE[torch.float32])


def test_no_tokens_and_no_rows_are_served() -> None:
    paged = build(Case(rows=((0, 5),)))
    assert attended(paged)[0].shape == (0, 8, 64)
    paged = build(Case(rows=(), spare_tokens=2))
    assert (attended(paged)[0] == 0).all()
