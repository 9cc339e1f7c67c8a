"""Head sizes, block sizes, ratios and cache types in every combination, decode and prefill in one batch."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import TOLERANCE, Case, assert_margin_untouched, assert_near, build

from pykv.kernels.arguments import Result
from pykv.kernels.attend import allocate_workspace, attend

pytestmark = pytest.mark.long

HEAD_DIMS = (40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
BLOCK_SIZES = (1, 2, 3, 5, 16, 17, 48, 64, 544)
RATIOS = (1, 3, 7, 8)


def check(case: Case) -> None:
    paged = build(case)
    result = Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    workspace = allocate_workspace(paged.query, paged.caches, paged.batch, paged.rule)
    attend(paged.query, paged.caches, paged.batch, paged.rule, result, workspace)
    assert_margin_untouched(result.out)
    assert_near(result.out, paged.expected()[0], TOLERANCE[case.dtype])


@pytest.mark.parametrize("cache", ["same", "int8", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes(head_dim: int, dtype: torch.dtype, cache: str) -> None:
    check(Case(rows=((1, 40), (7, 20)), num_heads=4, head_dim_k=head_dim, dtype=dtype, cache=cache))


@pytest.mark.parametrize("cache", ["same", "int8", "e4m3"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [0, 19])
def test_block_sizes_around_their_borders(block_size: int, cache: str, window: int) -> None:
    lengths = {max(1, block_size - 1), block_size, block_size + 1, min(3 * block_size + 1, 700)}
    rows = tuple((1 + index % 2 * 2, max(length, 3)) for index, length in enumerate(sorted(lengths)))
    check(
        Case(
            rows=rows,
            num_heads=2,
            head_dim_k=32,
            block_size=block_size,
            window=window,
            cache=cache,
            dtype=torch.float16,
        )
    )


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios(ratio: int, options: dict[str, object]) -> None:
    case = Case(rows=((1, 40), (9, 21), (1, 0)), num_heads=2 * ratio, spare_tokens=1)
    check(Case(**{**vars(case), **options}))
