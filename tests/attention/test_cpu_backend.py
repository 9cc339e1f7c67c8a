"""The CPU kernels against attention in float64, with every slot that no sequence owns poisoned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pykv._core import CpuAttention
from pykv.attention import cpu_backend, paged_attention

INSTRUCTIONS = ["portable", "avx2", "avx512", "avx512_bf16", "avx512_vnni"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1.2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
}
ROWS = ((1, 130), (5, 9), (70, 140), (1, 1), (2, 0), (0, 3), (1, 64))


def attend(batch, **options):
    """Calls the public function on the CPU backend."""
    return paged_attention(
        batch.query, batch.key_cache, batch.value_cache, **batch.step(), **options, backend="cpu"
    )


def attend_with(instructions, batch, **options):
    """Calls the CPU backend with no more than these instructions."""
    defaults = {"table_rows": None, "window": None, "softcap": None, "sinks": None}
    out = batch.query.new_full((*batch.query.shape[:2], batch.value_cache.shape[3]), 7.0)
    attention = CpuAttention(instructions)
    return cpu_backend.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        **{**defaults, "scale": batch.query.shape[2] ** -0.5, **batch.step(), **options},
        out=out,
        attention=attention,
    )


def check(paging, batch, output, **options):
    """Compares with attention in float64."""
    expected = paging.expected(batch, **options)
    torch.testing.assert_close(output.double(), expected, **TOLERANCES[batch.query.dtype])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 3.0, "sinks": torch.randn(9)}])
def test_every_instruction_set_equals_float64(paging, instructions, dtype, options):
    batch = paging.build(
        paging.shape(rows=ROWS, num_heads=9, num_kv_heads=3, head_dim_k=64, head_dim_v=64, dtype=dtype)
    )
    check(paging, batch, attend_with(instructions, batch, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (5, 1), (7, 7), (16, 2), (71, 1)])
def test_any_ratio_of_heads(paging, dtype, num_heads, num_kv_heads):
    batch = paging.build(paging.shape(rows=ROWS, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype))
    check(paging, batch, attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 40, 72, 80, 96, 112, 160, 192, 256])
def test_any_head_size(paging, dtype, head_dim):
    shape = paging.shape(rows=((1, 70), (3, 5)), head_dim_k=head_dim, head_dim_v=head_dim, dtype=dtype)
    batch = paging.build(shape)
    check(paging, batch, attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim_k", "head_dim_v"), [(192, 128), (24, 40), (576, 512)])
def test_keys_and_values_of_different_sizes(paging, dtype, head_dim_k, head_dim_v):
    shape = paging.shape(rows=((1, 70), (3, 5)), head_dim_k=head_dim_k, head_dim_v=head_dim_v, dtype=dtype)
    batch = paging.build(shape)
    check(paging, batch, attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 17, 48, 544])
def test_any_block_size_at_its_borders(paging, dtype, block_size):
    lengths = (max(1, block_size - 1), block_size, block_size + 1, 3 * block_size + 1)
    batch = paging.build(
        paging.shape(rows=tuple((1, n) for n in lengths), block_size=block_size, dtype=dtype)
    )
    check(paging, batch, attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 8, 63, 64, 65, 513])
def test_windows_at_every_offset(paging, dtype, window):
    rows = (*((1, length) for length in range(1, 20)), (30, 600), (1, 1030))
    batch = paging.build(paging.shape(rows=rows, num_heads=2, num_kv_heads=1, dtype=dtype))
    check(paging, batch, attend(batch, window=window), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_are_cut_and_merged(paging, dtype, num_threads):
    rows = ((1, 3000), (9, 2000), (1, 513), (1, 512))
    batch = paging.build(paging.shape(rows=rows, block_size=16, dtype=dtype))
    check(paging, batch, attend(batch))


def test_queries_of_a_chunk_see_the_cached_keys(paging):
    batch = paging.build(paging.shape(rows=((3, 10),)))
    check(paging, batch, attend(batch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (12, 12), (9, 3)])
def test_each_query_head_reads_its_own_kv_head(paging, dtype, num_heads, num_kv_heads):
    batch = paging.build(
        paging.shape(rows=((1, 100), (3, 40)), num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    )
    batch.value_cache.copy_(torch.arange(num_kv_heads)[None, :, None, None].expand_as(batch.value_cache))
    heads = torch.arange(num_heads) // (num_heads // num_kv_heads)
    expected = heads[None, :, None].expand(4, -1, 16).float()
    torch.testing.assert_close(attend(batch).float(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_very_negative_scores_are_ordinary_scores(paging, dtype):
    batch = paging.build(paging.shape(rows=((1, 40),), dtype=dtype), content=torch.rand)
    options = {"scale": -2e4}
    check(paging, batch, attend(batch, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["key_cache", "value_cache"])
def test_a_later_token_with_nan_leaves_earlier_ones_alone(paging, dtype, side):
    batch = paging.build(paging.shape(rows=((40, 40),), block_size=64, dtype=dtype))
    clean = attend(batch)
    for spoiled in (39, 38, 20, 7):
        getattr(batch, side)[int(batch.block_tables[0, 0]), :, spoiled] = torch.nan
        output = attend(batch)
        assert output[:spoiled].equal(clean[:spoiled])
        assert output[spoiled].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_that_left_the_window_may_hold_nan(paging, dtype):
    batch = paging.build(paging.shape(rows=((9, 40),), block_size=64, dtype=dtype))
    clean = attend(batch, window=6)
    block = int(batch.block_tables[0, 0])
    for left in (33, 32):
        kept = batch.value_cache[block, :, left].clone()
        batch.value_cache[block, :, left] = torch.nan
        output = attend(batch, window=6)
        seen = torch.tensor([position - left < 6 and left <= position for position in range(31, 40)])
        assert output[~seen].equal(clean[~seen])
        assert output[seen].isnan().all()
        batch.value_cache[block, :, left] = kept


def test_a_row_with_infinite_scores_is_nan_and_its_neighbours_are_not(paging):
    batch = paging.build(paging.shape(rows=((1, 5), (1, 5))))
    batch.query[0] = torch.inf
    output = attend(batch)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_strided_queries_caches_and_outputs(paging):
    batch = paging.build(paging.shape(rows=ROWS))
    expected = attend(batch)
    packed = torch.zeros(batch.query.shape[0], 3 * batch.query.shape[1] * 16)
    query = packed[:, :64].view(-1, 4, 16)
    query.copy_(batch.query)
    shape = (batch.key_cache.shape[0], 2, 4, 2, 40)
    both = torch.full(shape, torch.nan).permute(0, 3, 2, 1, 4)
    keys, values = both[:, 0, :, :, :16].transpose(1, 2), both[:, 1, :, :, 20:36].transpose(1, 2)
    keys.copy_(batch.key_cache)
    values.copy_(batch.value_cache)
    out = torch.full((expected.shape[0], 4, 50), 3.0)
    paged_attention(query, keys, values, **batch.step(), out=out[..., 10:26], backend="cpu")
    assert out[..., 10:26].equal(expected)
    assert out[..., :10].eq(3).all()
    assert out[..., 26:].eq(3).all()


def test_tokens_of_no_row_are_zero(paging):
    batch = paging.build(paging.shape(rows=((1, 13), (2, 9))))
    batch.query_starts[-1] = 2
    batch.seq_lens[1] = 8
    output = attend(batch)
    assert output[2].eq(0).all()
    assert output[:2].ne(0).all()


def test_an_empty_batch_and_no_tokens(paging):
    batch = paging.build(paging.shape(rows=()))
    assert attend(batch).shape == (0, 4, 16)


def test_the_null_block_is_not_looked_at_where_the_window_has_passed(paging):
    batch = paging.build(paging.shape(rows=((2, 40),), block_size=4))
    expected = attend(batch, window=5)
    batch.block_tables[0, :8] = 0
    assert attend(batch, window=5).equal(expected)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_offsets_beyond_32_bits(backend):
    """The caches are zeros that the system has not given yet: only the touched pages take memory."""
    num_blocks, block_size = 140_000, 64
    caches = [
        torch.from_numpy(np.zeros((num_blocks, 1, block_size, 256), np.uint8)).view(torch.bfloat16)
        for _ in range(2)
    ]
    assert caches[0].nbytes > 2**31
    query = torch.randn(1, 1, 128, dtype=torch.bfloat16)
    low, high = (
        torch.tensor([[3, 4]], dtype=torch.int32),
        torch.tensor([[131_075, 139_999]], dtype=torch.int32),
    )
    outputs = []
    for table in (low, high):
        for cache, seed in zip(caches, (0, 1), strict=True):
            generator = torch.Generator().manual_seed(seed)
            cache[table[0].long()] = torch.randn(2, 1, block_size, 128, generator=generator).bfloat16()
        outputs.append(
            paged_attention(
                query,
                *caches,
                block_tables=table,
                seq_lens=torch.tensor([100], dtype=torch.int32),
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
                backend=backend,
            )
        )
    assert outputs[0].equal(outputs[1])
    assert caches[0][131_075 % 2**17].eq(caches[0][3]).all()


def test_many_small_shapes(paging):
    """A sweep over what the other tests vary one at a time."""
    shapes = itertools.product([1, 3, 16], [(3, 1), (4, 2)], [8, 33], [torch.float32, torch.bfloat16])
    count = 0
    for seed, (block_size, (num_heads, num_kv_heads), head_dim, dtype) in enumerate(shapes):
        batch = paging.build(
            paging.shape(
                rows=((1, 66), (4, 7), (1, 2)),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim_k=head_dim,
                head_dim_v=head_dim,
                block_size=block_size,
                dtype=dtype,
                seed=seed,
            )
        )
        check(paging, batch, attend(batch, window=65), window=65)
        count += 1
    assert count == 24
