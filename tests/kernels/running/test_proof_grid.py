"""Ratios, head sizes, blocks, cache types and options against float64: every value with every value of the others.

A decode and a batch of chunks, decodes, an empty row and padding; what no sequence owns is NaN.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from paged_cases import TOLERANCE, Case, assert_margin_untouched, assert_near, build
from pairs import covering

from pykv.kernels.arguments import Result
from pykv.kernels.attend import allocate_workspace, attend

FACTORS = {
    ("num_heads", "num_kv_heads"): ((2, 2), (3, 1), (14, 2), (8, 1)),
    ("head_dim_k",): ((64,), (80,), (96,), (128,), (256,)),
    ("block_size",): ((1,), (16,), (48,), (64,)),
    ("dtype", "cache"): (
        (torch.float32, "same"),
        (torch.float16, "same"),
        (torch.bfloat16, "same"),
        (torch.float16, "int8"),
        (torch.bfloat16, "int8"),
        (torch.float16, "e4m3"),
        (torch.bfloat16, "e4m3"),
    ),
    ("rows", "spare_tokens"): (
        (((1, 70), (1, 33), (1, 0), (1, 1)), 0),
        (((1, 49), (5, 66), (1, 0), (0, 20), (18, 18)), 2),
    ),
    ("window",): ((0,), (21,)),
    ("softcap",): ((0.0,), (4.0,)),
    ("sinks",): ((False,), (True,)),
    ("shuffle_rows",): ((False,), (True,)),
}
CASES = [Case(**values) for values in covering(FACTORS)]


def test_every_two_values_meet() -> None:
    for (one, firsts), (other, seconds) in itertools.combinations(FACTORS.items(), 2):
        met = {
            (tuple(getattr(case, name) for name in one), tuple(getattr(case, name) for name in other))
            for case in CASES
        }
        assert met == set(itertools.product(firsts, seconds))
    assert len(CASES) < 60


@pytest.mark.parametrize("number", range(len(CASES)))
def test_attention_equals_float64(number: int) -> None:
    case = CASES[number]
    paged = build(case)
    result = Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    workspace = allocate_workspace(paged.query, paged.caches, paged.batch, paged.rule)
    attend(paged.query, paged.caches, paged.batch, paged.rule, result, workspace)
    assert_margin_untouched(result.out)
    expected_out, expected_lse = paged.expected()
    assert_near(result.out, expected_out, TOLERANCE[case.dtype])
    assert result.lse is not None
    seen = expected_lse > -math.inf
    assert_near(result.lse[seen], expected_lse[seen], TOLERANCE[case.dtype])
    assert (result.lse[~seen] == -math.inf).all()
