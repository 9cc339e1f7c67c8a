"""Caches of 8 bits: the same bytes from every backend, and attention over them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pykv.attention import dequantize, paged_attention, write_kv

BACKENDS = ["torch", "cpu"]
NARROW = [torch.int8, torch.float8_e4m3fn]
STEPS = {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 16}


def empty_caches(num_slots, num_kv_heads, head_dim, dtype, block_size=4):
    """Returns caches of 8 bits and scales for each token and head, filled with what nobody may read."""
    num_blocks = -(-num_slots // block_size)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    caches = [torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype) for _ in range(2)]
    return *caches, torch.full((num_blocks, 2, num_kv_heads, block_size), math.nan)


def written(rows, dtype, backend, kv_scales=None):
    """Writes rows [num_tokens, head_dim] as keys and values; returns the caches and scales."""
    key_cache, value_cache, scales = empty_caches(len(rows), 1, rows.shape[1], dtype)
    kv_scales = scales if kv_scales is None else kv_scales
    slots = torch.arange(len(rows))
    write_kv(
        rows[:, None], rows[:, None], key_cache, value_cache, slots, kv_scales=kv_scales, backend=backend
    )
    return key_cache, value_cache, kv_scales


def every_bf16():
    """Returns every bfloat16 there is, NaN included, as [2048, 32]."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(-1, 32)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kv_scales", [None, (1.0, 0.01)])
def test_every_bf16_gives_the_same_bytes_and_scales_on_every_backend(dtype, kv_scales):
    results = [written(every_bf16(), dtype, backend, kv_scales) for backend in BACKENDS]
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        assert one.view(torch.uint8).equal(other.view(torch.uint8))
    if kv_scales is None:
        torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float8_saturates_and_keeps_nan(backend):
    rows = torch.tensor([[448.0, 464.0, 465.0, 1000.0, -1000.0, math.inf, -math.inf, math.nan]])
    keys, _, _ = written(rows, torch.float8_e4m3fn, backend, (1.0, 1.0))
    expected = [448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0]
    assert keys[0, 0, 0].float().tolist()[:7] == expected
    assert keys[0, 0, 0, 7].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("largest", [0.0, 1e-40, 1e-8, 3.0, 6e4, 3e38])
def test_a_row_of_any_size_comes_back(backend, dtype, largest):
    row = torch.zeros(16)
    row[:4] = torch.tensor([largest, -largest, largest / 2, largest / 3])
    keys, values, scales = written(row[None], dtype, backend)
    assert scales[0, :, 0, 0].isfinite().all()
    for numbers in dequantize(keys, values, scales):
        back = numbers[0, 0, 0]
        assert back[4:].eq(0).all()
        assert (back - row).abs().max() <= largest * STEPS[dtype] / 2 * 1.0001 + 1e-38


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("constant", [0.0, 3.0, -3.0, 1e-8, 6e4])
def test_a_constant_row_and_one_number_alone_come_back(backend, dtype, constant):
    rows = torch.full((2, 24), constant)
    rows[1, :] = 0
    rows[1, 17] = constant
    keys, values, scales = written(rows, dtype, backend)
    assert scales[0, :, 0, :2].isfinite().all()
    for numbers in dequantize(keys, values, scales):
        torch.testing.assert_close(numbers[0, 0, :2], rows, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_scales_count_when_writing_and_when_reading(backend):
    """The keys' and the values' differ on purpose."""
    rows = torch.linspace(-1, 1, 64)[None]
    key_cache, value_cache, _ = empty_caches(1, 1, 64, torch.int8)
    scales = (0.05, 0.5)
    write_kv(
        5 * rows[:, None],
        50 * rows[:, None],
        key_cache,
        value_cache,
        torch.tensor([0]),
        kv_scales=scales,
        backend=backend,
    )
    keys, values = dequantize(key_cache, value_cache, scales)
    assert (keys[0, 0, 0] - 5 * rows[0]).abs().max() <= 0.05 / 2 * 1.001
    assert (values[0, 0, 0] - 50 * rows[0]).abs().max() <= 0.5 / 2 * 1.001
    swapped, _ = dequantize(key_cache, value_cache, scales[::-1])
    assert (swapped[0, 0, 0] - 5 * rows[0]).abs().max() > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_a_row_shows_in_its_scale(backend):
    rows = torch.tensor([[1.0, math.nan], [1.0, 2.0]])
    keys, values, scales = written(rows, torch.int8, backend)
    numbers, _ = dequantize(keys, values, scales)
    assert numbers[0, 0, 0].isnan().all()
    assert numbers[0, 0, 1].isfinite().all()


def narrow_batch(paging, dtype, kv_scales, query_dtype, backend, head_dim=64):
    """Writes a batch's keys and values in 8 bits; returns it with them, as they come back."""
    batch = paging.build(
        paging.shape(
            rows=((1, 130), (5, 9), (70, 140), (2, 0), (1, 600)),
            num_heads=6,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            dtype=query_dtype,
        )
    )
    num_slots = batch.key_cache.shape[0] * 4
    key_cache, value_cache, scales = empty_caches(num_slots, 2, head_dim, dtype)
    kv_scales = scales if kv_scales is None else kv_scales
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        positions = torch.arange(len(keys))
        slots = batch.block_tables[row][positions // 4].long() * 4 + positions % 4
        write_kv(keys, values, key_cache, value_cache, slots, kv_scales=kv_scales, backend=backend)
        numbers = dequantize(key_cache, value_cache, kv_scales)
        batch.keys[row], batch.values[row] = (part[slots // 4, :, slots % 4] for part in numbers)
    batch.key_cache, batch.value_cache = key_cache, value_cache
    return batch, kv_scales


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("kv_scales", [None, (0.03, 0.02)])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_equals_float64_on_what_was_stored(paging, backend, dtype, kv_scales, query_dtype):
    batch, kv_scales = narrow_batch(paging, dtype, kv_scales, query_dtype, backend)
    for options in ({}, {"window": 70, "softcap": 4.0}):
        output = paged_attention(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            **batch.step(),
            **options,
            kv_scales=kv_scales,
            backend=backend,
        )
        tolerance = 2e-5 if query_dtype is torch.float32 else 2e-2
        expected = paging.expected(batch, **options)
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", NARROW)
def test_the_keys_scale_and_the_values_scale_are_not_mixed_up(paging, backend, dtype):
    batch, kv_scales = narrow_batch(paging, dtype, (0.05, 0.5), torch.float32, backend)
    arguments = (batch.query, batch.key_cache, batch.value_cache)
    output = paged_attention(*arguments, **batch.step(), kv_scales=kv_scales, backend=backend)
    swapped = paged_attention(*arguments, **batch.step(), kv_scales=kv_scales[::-1], backend=backend)
    torch.testing.assert_close(output.double(), paging.expected(batch), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output, swapped, rtol=0.1)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", [17, 40, 80])
def test_head_sizes_that_fill_no_vector(paging, dtype, head_dim):
    batch, kv_scales = narrow_batch(paging, dtype, None, torch.bfloat16, "cpu", head_dim)
    output = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, **batch.step(), kv_scales=kv_scales
    )
    torch.testing.assert_close(output.double(), paging.expected(batch), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_is_read_as_its_number(dtype):
    """One sequence of 256 tokens, each with one code as its value and all the weight in turn."""
    codes = torch.arange(256, dtype=torch.uint8)
    value_cache = codes.view(dtype).reshape(16, 1, 16, 1).repeat(1, 1, 1, 32)
    key_cache = torch.zeros_like(value_cache.view(torch.uint8)).view(dtype)
    tables = torch.arange(16, dtype=torch.int32).expand(256, -1).contiguous()
    for query_dtype in (torch.float32, torch.bfloat16):
        output = paged_attention(
            torch.zeros(256, 1, 32, dtype=query_dtype),
            key_cache,
            value_cache,
            block_tables=tables,
            seq_lens=torch.arange(1, 257, dtype=torch.int32),
            query_starts=torch.arange(257, dtype=torch.int32),
            window=1,
            kv_scales=(1.0, 0.5),
        )
        expected = value_cache.reshape(256, 1, 32).float() * 0.5
        torch.testing.assert_close(output.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    key_cache, value_cache, _ = empty_caches(4, 1, 8, torch.int8)
    rows = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match="kv_scales"):
        write_kv(rows, rows, key_cache, value_cache, torch.tensor([0]), kv_scales=(1.0, scale))


class Divisors(TorchDispatchMode):
    """Collects what is divided by inside."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.div:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_nothing_is_divided_by_a_plain_number():
    """On a GPU that would multiply with the number's rounded inverse: other scales than the kernels' and the CPU's."""
    with Divisors() as divisors:
        written(torch.randn(3, 8), torch.int8, "torch")
    assert divisors.found
    assert all(isinstance(divisor, torch.Tensor) and divisor.dim() for divisor in divisors.found)
