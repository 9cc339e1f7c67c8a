"""Decode against float64, in a poisoned pool."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from paged_cases import DEVICE, TOLERANCE, Case, PagedBatch, assert_margin_untouched, assert_near, build

from pykv.kernels.arguments import Result, Workspace, query_rows
from pykv.kernels.decode import decode_every_token, decode_single_rows
from pykv.kernels.decode_reduce import reduce_every_token, reduce_single_rows
from pykv.kernels.tile_config import TileConfig

CASES = {
    "plain": Case(),
    "ratio 1, head 80, block 5": Case(num_heads=2, head_dim_k=80, block_size=5),
    "ratio 3, head 96, block 48, window": Case(num_heads=6, head_dim_k=96, block_size=48, window=24),
    "ratio 7, head 128, block 1, cap, sinks": Case(
        rows=((1, 40), (1, 9)), num_heads=14, head_dim_k=128, block_size=1, softcap=3.0, sinks=True
    ),
    "ratio 16, head 256, block 64": Case(
        rows=((1, 65), (1, 1)), num_heads=16, num_kv_heads=1, head_dim_k=256, block_size=64
    ),
    "block 544": Case(rows=((1, 545), (1, 543)), block_size=544, num_heads=2, head_dim_k=32),
    "keys wider than values, scattered rows": Case(head_dim_k=48, head_dim_v=32, shuffle_rows=True, sinks=True),
    "everything": Case(
        rows=((1, 77), (1, 0), (1, 17), (1, 16)), head_dim_k=40, block_size=17, window=16, softcap=2.0, sinks=True,
        shuffle_rows=True,
    ),
}  # fmt: skip


def decode(paged: PagedBatch, num_splits: int, tile: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    result = Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    workspace = None
    if num_splits > 1:
        sizes = (len(paged.query), paged.query.shape[1], num_splits)
        workspace = Workspace(
            torch.full((*sizes, paged.case.value_dim), math.nan), torch.full(sizes, math.nan)
        )
    config = TileConfig(query_rows(paged.query.shape[1] // paged.caches.num_kv_heads), tile, 4, 2)
    decode_every_token(paged.query, paged.caches, paged.batch, paged.rule, result, workspace, config)
    if workspace is not None:
        reduce_every_token(workspace, paged.batch, paged.rule, result)
    assert_margin_untouched(result.out)
    assert result.lse is not None
    return result.out, result.lse


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_equals_float64(name: str, num_splits: int) -> None:
    paged = build(CASES[name])
    out, lse = decode(paged, num_splits)
    expected_out, expected_lse = paged.expected()
    assert_near(out, expected_out, TOLERANCE[torch.float32])
    seen = expected_lse > -math.inf
    assert_near(lse[seen], expected_lse[seen], TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", ["same", "int8", "e4m3"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_decode_of_every_cache_type_equals_float64(name: str, cache: str, dtype: torch.dtype) -> None:
    paged = build(dataclasses.replace(CASES[name], cache=cache, dtype=dtype))
    out, _ = decode(paged, num_splits=2)
    assert_near(out, paged.expected()[0], TOLERANCE[dtype])


def test_tiles_inside_one_block_and_across_blocks_agree() -> None:
    paged = build(Case(rows=((1, 150),), block_size=64))
    inside, _ = decode(paged, 2, tile=32)
    across, _ = decode(paged, 2, tile=128)
    assert_near(inside, across.double(), TOLERANCE[torch.float32])


def test_an_empty_row_gives_zeros_and_minus_infinity() -> None:
    for sinks, num_splits in itertools.product((False, True), (1, 4)):
        paged = build(Case(rows=((1, 20), (1, 0), (1, 3)), sinks=sinks))
        out, lse = decode(paged, num_splits)
        assert (out[1] == 0).all()
        assert (lse[1] == -math.inf).all()
        assert out[[0, 2]].abs().min() > 0


@pytest.mark.parametrize(("cache", "num_splits"), [("same", 1), ("same", 4), ("int8", 4)])
def test_a_nan_of_a_sequence_reaches_its_result_however_it_is_split(cache: str, num_splits: int) -> None:
    paged = build(Case(rows=((1, 120), (1, 120)), num_heads=4, head_dim_k=32, cache=cache))
    poisoned = paged.caches.key if paged.caches.scales is None else paged.caches.scales[:, 0]
    block = int(paged.batch.block_tables[0, 3])
    poisoned[block, 1, 5] = math.nan  # of the second KV head
    out, lse = decode(paged, num_splits)
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_a_length_beyond_the_table_reads_no_further_than_the_table() -> None:
    paged = build(Case(rows=((1, 32),)))
    expected, _ = decode(paged, 1)
    exact = dataclasses.replace(paged.batch, block_tables=paged.batch.block_tables[:, :2])
    assert int(exact.block_tables[0].min()) > 0
    paged.batch = dataclasses.replace(exact, seq_lens=torch.tensor([1000], dtype=torch.int32))
    out, _ = decode(paged, 1)
    assert torch.equal(out, expected)


def test_tokens_of_longer_rows_are_right_where_decode_takes_every_token() -> None:
    paged = build(Case(rows=((0, 5), (3, 20), (0, 0), (1, 9), (0, 4)), spare_tokens=1))
    out, _ = decode(paged, 2)
    assert_near(out, paged.expected()[0], TOLERANCE[torch.float32])


def test_single_rows_leave_the_others_alone() -> None:
    paged = build(Case(rows=((1, 20), (3, 9), (0, 7), (1, 33)), spare_tokens=2))
    out = paged.empty_result()
    sizes = (4, 8, 2)
    workspace = Workspace(torch.full((*sizes, 64), math.nan), torch.full(sizes, math.nan))
    arguments = (paged.query, paged.caches, paged.batch, paged.rule, Result(out), workspace)
    decode_single_rows(*arguments, TileConfig(16, 32, 4, 2))
    reduce_single_rows(workspace, paged.batch, paged.rule, Result(out))
    expected = paged.expected()[0]
    assert_near(out[[0, 4]], expected[[0, 4]], TOLERANCE[torch.float32])
    assert out[[1, 2, 3, 5, 6]].isnan().all()


def test_query_heads_read_their_own_kv_head() -> None:
    for num_heads, num_kv_heads in ((8, 2), (12, 12), (6, 2)):
        paged = build(Case(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim_k=32))
        paged.caches.value.copy_(
            torch.arange(num_kv_heads)[None, :, None, None].expand_as(paged.caches.value)
        )
        out, _ = decode(paged, 2)
        group = num_heads // num_kv_heads
        expected = torch.arange(num_kv_heads).repeat_interleave(group).double()
        assert_near(out, expected[None, :, None].expand_as(out), TOLERANCE[torch.float32])


def test_scores_far_below_any_sentinel_still_count() -> None:
    paged = build(Case(scale=-1e3))
    paged.query.abs_().add_(1.0)
    paged.caches.key.abs_().add_(1.0)
    paged.keys = [keys.abs() + 1.0 for keys in paged.keys]
    expected, lse = paged.expected()
    assert lse.max() < -6e4
    out, _ = decode(paged, 3)
    assert_near(out, expected, 5e-2 if DEVICE.type == "cpu" else 0.5)  # float32 holds a score of 2e5 to 0.02
    assert out.abs().max() > 0.1


def test_a_soft_cap_of_enormous_scores_is_exact() -> None:
    paged = build(Case(softcap=5.0, scale=1.0, magnitude=1e4))
    out, _ = decode(paged, 2)
    assert_near(out, paged.expected()[0], 1e-4)


def test_queries_beyond_float16_meet_an_int8_cache() -> None:
    paged = build(Case(cache="int8", dtype=torch.bfloat16, magnitude=1e6, scale=1e-7))
    out, _ = decode(paged, 2)
    assert_near(out, paged.expected()[0], TOLERANCE[torch.bfloat16])


def test_value_scales_of_any_size_keep_their_precision() -> None:
    paged = build(Case(rows=((1, 64),), cache="int8", dtype=torch.float16, head_dim_k=32))
    assert paged.caches.scales is not None
    factors = torch.logspace(-9, 3, 64)
    for position, factor in enumerate(factors):
        block = int(paged.batch.block_tables[0, position // 16])
        paged.caches.scales[block, 1, :, position % 16] *= factor
    paged.values[0] *= factors.double()[:, None, None]
    out, _ = decode(paged, 2)
    assert_near(out, paged.expected()[0], TOLERANCE[torch.float16])
