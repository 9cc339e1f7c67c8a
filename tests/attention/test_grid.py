"""Random batches of every kind against float64: few in the short form, thousands in the long one."""

import random

import pytest
import torch

from pykv._core import CpuAttention
from pykv.attention import cpu_backend, write_kv

INSTRUCTIONS = ("portable", "avx2", "avx512", "avx512_bf16", "avx512_vnni")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (None, None, torch.int8, torch.float8_e4m3fn)
BLOCK_SIZES = (1, 2, 3, 7, 16, 48, 64, 100, 544)
BORDERS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 200, 511, 512, 513, 700)
RATIOS = (1, 1, 2, 3, 4, 5, 7, 8, 16, 71)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random_batch(paging, rng):
    """A batch, its options for attention, and the scales of its caches if they have 8 bits."""
    ratio, kv_heads = rng.choice(RATIOS), rng.choice((1, 2, 3))
    head_dim_k = rng.choice((rng.randint(1, 256), 64, 80, 128))
    rows = []
    for _ in range(rng.randint(1, 4)):
        length = rng.choice(BORDERS) if ratio * head_dim_k < 1000 else rng.randint(1, 70)
        rows.append((rng.choice((1, 1, min(length, rng.randint(1, 9)))), length))
    shape = paging.shape(
        rows=(*rows, *rng.choice(((), ((2, 0),), ((0, 3),)))),
        num_heads=ratio * kv_heads,
        num_kv_heads=kv_heads,
        head_dim_k=head_dim_k,
        head_dim_v=rng.choice((head_dim_k, head_dim_k, rng.randint(1, 256))),
        block_size=rng.choice(BLOCK_SIZES),
        dtype=rng.choice(DTYPES),
        seed=rng.randint(0, 2**31),
    )
    batch = paging.build(shape)
    options = {
        "scale": rng.choice((shape.head_dim_k**-0.5, 0.0, -0.2, 0.7 * shape.head_dim_k**-0.5)),
        "window": rng.choice((None, None, 1, rng.randint(1, 80), 513)),
        "softcap": rng.choice((None, None, 1.0, 30.0)),
        "sinks": rng.choice((None, torch.randn(shape.num_heads))),
    }
    narrow = rng.choice(NARROW)
    return batch, options, narrow if narrow is None else narrowed(batch, narrow)


def narrowed(batch, dtype):
    """Turns the batch's caches into 8 bits, its keys and values into what these hold, and returns the scales."""
    num_blocks, kv_heads, block_size, _ = batch.key_cache.shape
    scales = torch.full((num_blocks, 2, kv_heads, block_size), torch.nan)
    caches = [
        torch.full(cache.shape, 0x7F, dtype=torch.uint8).view(dtype)
        for cache in (batch.key_cache, batch.value_cache)
    ]
    for row, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length)
        blocks = batch.block_tables[row].long()[positions // block_size]
        write_kv(
            batch.keys[row],
            batch.values[row],
            *caches,
            blocks * block_size + positions % block_size,
            kv_scales=scales,
        )
        for side, (cache, owned) in enumerate(zip(caches, (batch.keys, batch.values), strict=True)):
            numbers = cache[blocks, :, positions % block_size].float()
            owned[row] = numbers * scales[blocks, side, :, positions % block_size][..., None]
    batch.key_cache, batch.value_cache = caches
    return scales


def check(paging, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, options, scales = random_batch(paging, rng)
    out = batch.query.new_full((*batch.query.shape[:2], batch.value_cache.shape[3]), 7.0)
    attention = CpuAttention(rng.choice(INSTRUCTIONS))
    call = {"table_rows": None, **options, **batch.step(), "kv_scales": scales, "attention": attention}
    caches = batch.key_cache, batch.value_cache
    cpu_backend.paged_attention(batch.query, *caches, **call, out=out)
    tolerance = TOLERANCES[batch.query.dtype]
    expected = paging.expected(batch, **options)
    torch.testing.assert_close(
        out.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"seed {seed}: {text}"
    )
    again = cpu_backend.paged_attention(
        batch.query, *caches, **call, out=torch.empty_like(out), share_prefixes=rng.choice((True, False))
    )
    assert again.equal(out)


@pytest.mark.parametrize("part", range(4))
def test_random_batches(paging, part):
    for seed in range(part * 50, part * 50 + 50):
        check(paging, seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_random_batches(paging, part):
    for seed in range(1000 + part * 500, 1500 + part * 500):
        check(paging, seed)
