"""The specification against attention computed one query at a time in float64."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import copy_blocks, paged_attention, write_kv

OPTIONS = [
    {},
    {"window": 3},
    {"softcap": 2.0},
    {"scale": 0.7},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"window": 5, "softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_equals_float64_with_every_other_slot_poisoned(paging, options, block_size):
    batch = paging.build(paging.shape(rows=((1, 13), (5, 9), (0, 4), (2, 0), (7, 7)), block_size=block_size))
    output = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, **batch.step(), **options, backend="torch"
    )
    torch.testing.assert_close(output.double(), paging.expected(batch, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (5, 1), (7, 7)])
def test_any_ratio_and_different_head_sizes(paging, num_heads, num_kv_heads):
    shape = paging.shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim_k=24, head_dim_v=10)
    batch = paging.build(shape)
    output = paged_attention(batch.query, batch.key_cache, batch.value_cache, **batch.step(), backend="torch")
    torch.testing.assert_close(output.double(), paging.expected(batch), rtol=1e-5, atol=1e-6)


def test_table_rows_pick_the_tables(paging):
    batch = paging.build(paging.shape())
    order = torch.tensor([2, 0, 1])
    step = {**batch.step(), "table_rows": order.argsort().to(torch.int32)}
    step["block_tables"] = batch.block_tables[order].contiguous()
    output = paged_attention(batch.query, batch.key_cache, batch.value_cache, **step, backend="torch")
    torch.testing.assert_close(output.double(), paging.expected(batch), rtol=1e-5, atol=1e-6)


def test_a_later_token_with_nan_leaves_earlier_ones_alone(paging):
    batch = paging.build(paging.shape(rows=((4, 4),), block_size=4))
    block = int(batch.block_tables[0, 0])
    clean = paged_attention(batch.query, batch.key_cache, batch.value_cache, **batch.step(), backend="torch")
    batch.value_cache[block, :, 3] = torch.nan
    batch.key_cache[block, :, 3] = torch.nan
    output = paged_attention(batch.query, batch.key_cache, batch.value_cache, **batch.step(), backend="torch")
    torch.testing.assert_close(output[:3], clean[:3], rtol=1e-6, atol=1e-6)
    assert output[3].isnan().all()


def test_write_kv_skips_minus_one_and_touches_nothing_else():
    key_cache, value_cache = torch.zeros(4, 2, 2, 3), torch.zeros(4, 2, 2, 5)
    key, value = torch.ones(3, 2, 3), torch.full((3, 2, 5), 2.0)
    write_kv(key, value, key_cache, value_cache, torch.tensor([5, -1, -1]), backend="torch")
    assert key_cache[2, :, 1].eq(1).all()
    assert value_cache[2, :, 1].eq(2).all()
    assert key_cache.sum() == 6
    assert value_cache.sum() == 20


def test_copy_blocks_copies_keys_and_values_of_every_layer():
    keys = [torch.randn(4, 1, 2, 3) for _ in range(2)]
    values = [torch.randn(4, 1, 2, 5) for _ in range(2)]
    before = [cache.clone() for cache in (*keys, *values)]
    copy_blocks(keys, values, torch.tensor([[1, 3], [1, 2]]), backend="torch")
    for cache, old in zip((*keys, *values), before, strict=True):
        assert cache[[2, 3]].equal(old[[1, 1]])
        assert cache[:2].equal(old[:2])
