"""The backend "triton" against the specification, through the public functions."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE, TOLERANCE, Case, assert_near, build, empty_caches

import pykv
from pykv.attention import LayerCache, transfer_blocks
from pykv.kernels.arguments import Caches

MIXED = ((1, 40), (17, 30), (0, 0), (1, 0), (9, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=MIXED, spare_tokens=2),
        Case(rows=((1, 40), (1, 9)), shuffle_rows=True, block_size=5, head_dim_k=24, sinks=True),
        Case(rows=MIXED, window=7, softcap=4.0, num_heads=6, head_dim_k=40, head_dim_v=16, shuffle_rows=True),
    ],
    ids=["mixed", "decodes", "window and cap"],
)
def test_attention_equals_the_specification(case: Case, dtype: torch.dtype) -> None:
    paged = build(Case(**{**vars(case), "dtype": dtype}))
    options = {
        "block_tables": paged.batch.block_tables,
        "seq_lens": paged.batch.seq_lens,
        "query_starts": paged.batch.query_starts,
        "table_rows": paged.batch.table_rows,
        "window": case.window or None,
        "softcap": case.softcap or None,
        "sinks": paged.rule.sinks,
    }
    arguments = (paged.query, paged.caches.key, paged.caches.value)
    actual = pykv.paged_attention(*arguments, **options, backend="triton", out=paged.empty_result())
    expected = pykv.paged_attention(*arguments, **options, backend="torch")
    assert_near(actual, expected.double(), TOLERANCE[dtype])


def test_write_and_copy_equal_the_specification() -> None:
    case = Case(dtype=torch.bfloat16, block_size=7, head_dim_k=40, head_dim_v=24)
    results = []
    for backend in ("triton", "torch"):
        generator = torch.Generator(DEVICE).manual_seed(3)
        layers = [empty_caches(case, 6) for _ in range(2)]
        for layer in layers:
            layer.key.zero_()
            layer.value.zero_()
            key, value = (torch.randn(9, 2, width, generator=generator).bfloat16() for width in (40, 24))
            slots = torch.tensor([7, 8, 9, -1, 30, 29, 41, -1, 20])
            pykv.write_kv(key, value, layer.key, layer.value, slots, backend=backend)
        keys, values = [layer.key for layer in layers], [layer.value for layer in layers]
        pykv.copy_blocks(keys, values, torch.tensor([[1, 0], [4, 3]]), backend=backend)
        results.append([*keys, *values])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
        assert actual.any()


def test_float64_is_refused_by_name() -> None:
    paged = build(Case(dtype=torch.float64))
    with pytest.raises(TypeError, match="float64"):
        pykv.paged_attention(
            paged.query,
            paged.caches.key,
            paged.caches.value,
            block_tables=paged.batch.block_tables,
            seq_lens=paged.batch.seq_lens,
            query_starts=paged.batch.query_starts,
            backend="triton",
        )


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
def test_eight_bits_and_log_sum_exps_equal_the_specification(cache: str) -> None:
    paged = build(Case(rows=MIXED, cache=cache, dtype=torch.float32, shuffle_rows=True, window=20))
    options = {
        "block_tables": paged.batch.block_tables,
        "seq_lens": paged.batch.seq_lens,
        "query_starts": paged.batch.query_starts,
        "table_rows": paged.batch.table_rows,
        "window": 20,
        "kv_scales": paged.caches.scales,
    }
    arguments = (paged.query, paged.caches.key, paged.caches.value)
    results = []
    for backend in ("triton", "torch"):
        lse = torch.full((2, *paged.query.shape[:2]), torch.nan)
        for part in (lse[0], lse[1].T.contiguous().T):  # the kernels write contiguous ones
            out = pykv.paged_attention(*arguments, **options, log_sum_exp=part, backend=backend)
            results.append((out, part))
    for out, lse in results[:3]:
        assert_near(out, results[3][0].double(), TOLERANCE[torch.float32])
        torch.testing.assert_close(lse, results[3][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
def test_eight_bits_are_written_and_moved_as_the_specification_says(cache: str) -> None:
    case = Case(dtype=torch.bfloat16, block_size=7, head_dim_k=40, head_dim_v=24, cache=cache)
    results = []
    for backend in ("triton", "torch"):
        generator = torch.Generator(DEVICE).manual_seed(3)
        layers = [LayerCache(*vars_of(empty_caches(case, num_blocks))) for num_blocks in (6, 4)]
        for part in (part for layer in layers for part in layer.parts()):
            part.view(torch.uint8).zero_()
        key, value = (torch.randn(9, 2, width, generator=generator).bfloat16() for width in (40, 24))
        slots = torch.tensor([7, 8, 9, -1, 30, 29, 41, -1, 20])
        pool, host = layers
        pykv.write_kv(key, value, pool.key, pool.value, slots, kv_scales=pool.scales, backend=backend)
        transfer_blocks([pool], [host], torch.tensor([[1, 3], [4, 1]]), backend=backend)
        results.append([part.contiguous().view(torch.uint8) for layer in layers for part in layer.parts()])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
        assert actual.any()


def vars_of(caches: Caches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return caches.key, caches.value, caches.scales


def test_scales_of_the_whole_tensor_are_refused_by_name() -> None:
    paged = build(Case(cache="int8"))
    with pytest.raises(
        ValueError, match=r"kv_scales is \(1.0, 1.0\): backend 'triton' serves a scale for each"
    ):
        pykv.paged_attention(
            paged.query,
            paged.caches.key,
            paged.caches.value,
            block_tables=paged.batch.block_tables,
            seq_lens=paged.batch.seq_lens,
            query_starts=paged.batch.query_starts,
            kv_scales=(1.0, 1.0),
            backend="triton",
        )
