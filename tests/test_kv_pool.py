"""The pool's tensors: shapes, neighbours in memory, sharing, copies, and the refusal of what does not fit."""

from __future__ import annotations

import pytest
import torch

from pykv import ConfigError, KvLayout, KvPool
from pykv.layout import KvLayer

LAYOUT = KvLayout((KvLayer(3, 8, 8), KvLayer(2, 12, 4, window=5), KvLayer(3, 8, 8, reads_layer=0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_size(dtype: torch.dtype) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4, dtype=dtype)
    assert [cache.shape for cache in pool.key_caches] == [(5, 3, 4, 8), (5, 2, 4, 12), (5, 3, 4, 8)]
    assert [cache.shape for cache in pool.value_caches] == [(5, 3, 4, 8), (5, 2, 4, 4), (5, 3, 4, 8)]
    assert {cache.dtype for cache in (*pool.key_caches, *pool.value_caches)} == {dtype}
    assert pool.nbytes == 5 * LAYOUT.block_bytes(4, dtype) == 5 * 4 * (48 + 32) * dtype.itemsize


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_and_values_of_a_block_are_neighbours(layer: int) -> None:
    pool = KvPool(LAYOUT, num_blocks=5, block_size=4)
    keys, values = pool.key_caches[layer], pool.value_caches[layer]
    num_key_elements, num_value_elements = keys[0].numel(), values[0].numel()
    assert keys[0].is_contiguous()
    assert values[0].is_contiguous()
    assert values.data_ptr() - keys.data_ptr() == num_key_elements * 2
    assert keys.stride(0) == values.stride(0) == num_key_elements + num_value_elements


def test_no_two_elements_share_memory() -> None:
    pool = KvPool(LAYOUT, num_blocks=3, block_size=2, dtype=torch.float32)
    own = [*pool.key_caches[:2], *pool.value_caches[:2]]
    total = sum(cache.numel() for cache in own)
    written = 0
    for cache in own:
        cache.copy_(torch.arange(written, written + cache.numel()).view(cache.shape))
        written += cache.numel()
    found = torch.cat([cache.flatten() for cache in own])
    assert torch.equal(found, torch.arange(total, dtype=torch.float32))
    assert written * 4 == pool.nbytes


def test_layers_that_share_kv_are_the_same_memory() -> None:
    pool = KvPool(LAYOUT, num_blocks=3, block_size=2)
    pool.key_caches[0][1] = 7
    assert torch.all(pool.key_caches[2][1] == 7)


def test_copy_blocks_copies_keys_and_values_of_every_layer() -> None:
    pool = KvPool(LAYOUT, num_blocks=4, block_size=2, dtype=torch.float32)
    caches = [*pool.key_caches[:2], *pool.value_caches[:2]]
    for cache in caches:
        cache.copy_(torch.rand(cache.shape))
    before = [cache.clone() for cache in caches]
    pool.copy_blocks(torch.tensor([[1, 3], [2, 0]]), backend="torch")
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[2, 1, 2, 1]])


def test_pool_beyond_memory_is_refused_with_both_numbers() -> None:
    needed = 10**12 * LAYOUT.block_bytes(16, torch.bfloat16)
    message = (
        rf"num_blocks is {10**12}: the KV pool needs {needed} bytes, but \d+ bytes .* at most \d+ blocks"
    )
    with pytest.raises(ConfigError, match=message):
        KvPool(LAYOUT, num_blocks=10**12)


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_below_one_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        KvPool(LAYOUT, **{"num_blocks": 2, "block_size": 2, field: value})  # type: ignore[arg-type]


def test_dtype_and_storage_that_no_backend_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8; allowed are torch\.float32"):
        KvPool(LAYOUT, 2, dtype=torch.int8)
    with pytest.raises(ConfigError, match="'latent'"):
        KvPool(KvLayout((KvLayer(1, 8, 0),), "latent"), 2)


def test_memory_is_taken_only_when_it_is_written() -> None:
    pool = KvPool(LAYOUT, num_blocks=200_000, block_size=16)
    assert pool.nbytes > 500_000_000
    before = resident_bytes()
    pool.key_caches[1][-1] = 1
    assert pool.key_caches[1][-1].sum() == 2 * 16 * 12
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    psutil = pytest.importorskip("psutil")
    return int(psutil.Process().memory_info().rss)
