"""What decodes share is read once for all of them, and the results are those of reading alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from paged_cases import TOLERANCE, Case, PagedBatch, assert_margin_untouched, assert_near, build
from paged_cases import share_keys as share

from pykv.attention import paged_attention
from pykv.kernels.arguments import Result, Workspace, query_rows
from pykv.kernels.attend import allocate_workspace
from pykv.kernels.decode import decode_every_token, decode_single_rows
from pykv.kernels.decode_reduce import reduce_every_token, reduce_single_rows
from pykv.kernels.find_prefixes import FEWEST_SHARED, find_prefixes
from pykv.kernels.shared_prefix import launch_shared_prefix
from pykv.kernels.tile_config import TileConfig

UNIT = 16
ROWS = ((1, 90), (1, 70), (1, 75), (1, 40), (1, 90), (1, 0))


def found(paged: PagedBatch, unit: int = UNIT, fewest: int = UNIT) -> torch.Tensor:
    prefixes = torch.full((3, paged.batch.num_rows), -9, dtype=torch.int32)
    find_prefixes(prefixes, paged.batch, paged.rule, paged.caches.block_size, unit, fewest)
    return prefixes


def attended(
    paged: PagedBatch,
    *,
    members_rows: int = 32,
    tile: int = 32,
    num_splits: int = 2,
    num_prefix_splits: int = 2,
) -> tuple[torch.Tensor, torch.Tensor, Workspace]:
    """Every kernel of a decode with sharing; the workspace was left dirty by somebody else."""
    by_row = len(paged.query) > paged.batch.num_rows
    sizes = (
        min(len(paged.query), paged.batch.num_rows),
        paged.query.shape[1],
        num_splits + num_prefix_splits,
    )
    stale = torch.full((*sizes, paged.case.value_dim), math.nan), torch.zeros(sizes)
    workspace = Workspace(*stale, found(paged), num_prefix_splits)
    result = Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    group = query_rows(paged.query.shape[1] // paged.caches.num_kv_heads)
    launch_shared_prefix(
        paged.query, paged.caches, paged.batch, paged.rule, workspace,
        TileConfig(max(members_rows, group), tile, 4, 2), by_row=by_row,
    )  # fmt: skip
    decode, reduce = (
        (decode_single_rows, reduce_single_rows) if by_row else (decode_every_token, reduce_every_token)
    )
    config = TileConfig(group, UNIT, 4, 2)
    decode(paged.query, paged.caches, paged.batch, paged.rule, result, workspace, config)
    reduce(workspace, paged.batch, paged.rule, result)
    assert_margin_untouched(result.out)
    assert result.lse is not None
    return result.out, result.lse, workspace


def family(case: Case) -> PagedBatch:
    """Rows 0, 1, 2 and 4 begin alike, each as far as its own length or less; row 3 is alone, row 5 empty."""
    paged = build(case)
    share(paged, 0, 1, 64)
    share(paged, 0, 2, 48)
    share(paged, 0, 4, 80)
    return paged


def test_rows_are_sorted_into_families_and_what_each_shares_is_told_exactly() -> None:
    order, ranks, shared = found(family(Case(rows=ROWS))).tolist()
    assert sorted(order) == list(range(6))
    assert shared == [64, 64, 48, 0, 80, 0]  # the first row is compared with the second
    place = order.index(0)
    assert order[place : place + 4] == [0, 1, 2, 4]
    assert ranks[place : place + 4] == [0, 1, 2, 3]


@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
def test_blocks_of_any_size_are_shared_in_whole_tiles(block_size: int) -> None:
    paged = build(Case(rows=((1, 99), (1, 98)), block_size=block_size, num_heads=2, head_dim_k=32))
    share(paged, 0, 1, 75 // block_size * block_size)
    common = 75 // block_size * block_size // UNIT * UNIT
    assert found(paged)[2].tolist() == [common, common]
    out, _, _ = attended(paged)
    assert_near(out, paged.expected()[0], TOLERANCE[torch.float32])


def test_more_rows_and_columns_than_are_looked_at_together() -> None:
    paged = build(Case(rows=((1, 150),) * 140, block_size=1, num_heads=1, num_kv_heads=1, head_dim_k=32))
    for row in range(1, 140, 2):
        share(paged, 0, row, 144)
    order, ranks, shared = found(paged).tolist()
    members = [0, *range(1, 140, 2)]
    assert [shared[row] for row in members] == [144] * 71
    assert sum(shared) == 144 * 71
    place = order.index(0)
    assert order[place : place + 71] == members
    assert ranks[place : place + 71] == list(range(71))


def test_who_cannot_share_does_not() -> None:
    paged = family(Case(rows=((1, 90), (1, 70), (2, 75), (1, 15), (1, 90), (0, 60))))
    assert found(paged)[2].tolist() == [64, 64, 0, 0, 80, 0]  # row 2 has two tokens, row 5 none
    assert found(paged, fewest=65)[2].tolist() == [0, 0, 0, 0, 80, 0]
    narrow = dataclasses.replace(paged, rule=dataclasses.replace(paged.rule, window=80))
    assert found(narrow)[2].tolist() == [0] * 6  # the window shortens all but row 1


CASES = {
    "plain": Case(rows=ROWS),
    "every option": Case(
        rows=ROWS, num_heads=14, head_dim_k=80, head_dim_v=40, softcap=3.0, sinks=True, shuffle_rows=True, window=90
    ),
    "ratio 3": Case(rows=ROWS, num_heads=6, head_dim_k=32),
    "ratio 1": Case(rows=ROWS, num_heads=2, head_dim_k=96),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [(1, 1), (2, 3)])
def test_sharing_equals_float64(name: str, splits: tuple[int, int]) -> None:
    paged = family(CASES[name])
    out, lse, _ = attended(paged, num_splits=splits[0], num_prefix_splits=splits[1])
    expected_out, expected_lse = paged.expected()
    assert_near(out, expected_out, TOLERANCE[torch.float32])
    seen = expected_lse > -math.inf
    assert_near(lse[seen], expected_lse[seen], TOLERANCE[torch.float32])
    assert (out[5] == 0).all()
    assert (lse[~seen] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", ["same", "int8", "e4m3"])
def test_sharing_of_every_cache_type_equals_float64(cache: str, dtype: torch.dtype) -> None:
    paged = family(Case(rows=ROWS, head_dim_k=32, cache=cache, dtype=dtype))
    out, _, _ = attended(paged)
    assert_near(out, paged.expected()[0], TOLERANCE[dtype])


def test_a_family_larger_than_a_program_is_read_by_several() -> None:
    paged = build(Case(rows=((1, 60),) * 11, num_heads=8, num_kv_heads=1, head_dim_k=32))
    for row in range(1, 11):
        share(paged, 0, row, 32 if row == 5 else 48)
    out, _, _ = attended(paged, members_rows=32)  # four rows of eight heads a program
    assert_near(out, paged.expected()[0], TOLERANCE[torch.float32])


def test_decodes_share_beside_chunks_of_prefill() -> None:
    rows = ((3, 40), (1, 90), (1, 80), (2, 9), (1, 64))
    paged = build(Case(rows=rows, spare_tokens=1, shuffle_rows=True))
    share(paged, 1, 2, 64)
    share(paged, 1, 4, 48)
    out, _, _ = attended(paged)
    expected = paged.expected()[0]
    single = [3, 4, 7]
    assert_near(out[single], expected[single], TOLERANCE[torch.float32])
    assert out[[0, 1, 2, 5, 6, 8]].isnan().all()


def test_what_is_shared_is_read_by_no_row_itself() -> None:
    """Each row's own parts leave the prefix out, and the prefix's parts hold nothing of rows that share none."""
    paged = family(Case(rows=ROWS, num_heads=2, head_dim_k=32))
    _, _, workspace = attended(paged)
    prefix = torch.logsumexp(workspace.lse[..., 2:] * math.log(2), -1)
    for row, shared in enumerate(found(paged)[2].tolist()):
        if not shared:
            assert (prefix[row] == -math.inf).all()
            continue
        keys = paged.keys[row][:shared, :].double()
        scores = torch.einsum("hd,khd->hk", paged.query[row].double(), keys) * paged.rule.scale
        assert_near(prefix[row], torch.logsumexp(scores, -1), TOLERANCE[torch.float32])


def test_the_backend_shares_what_is_long_enough() -> None:
    length = FEWEST_SHARED + 40
    paged = build(Case(rows=((1, length), (1, length + 9)), head_dim_k=32, num_heads=4))
    share(paged, 0, 1, FEWEST_SHARED)
    workspace = allocate_workspace(paged.query, paged.caches, paged.batch, paged.rule, share_prefixes=True)
    assert workspace is not None
    assert workspace.prefixes is not None
    assert min(workspace.num_splits, workspace.num_prefix_splits) >= 1
    alone = allocate_workspace(paged.query, paged.caches, paged.batch, paged.rule)
    assert alone is None or alone.prefixes is None
    out = paged_attention(
        paged.query,
        paged.caches.key,
        paged.caches.value,
        block_tables=paged.batch.block_tables.clamp(min=0),
        seq_lens=paged.batch.seq_lens,
        query_starts=paged.batch.query_starts,
        backend="triton",
    )
    assert_near(out, paged.expected()[0], TOLERANCE[torch.float32])
