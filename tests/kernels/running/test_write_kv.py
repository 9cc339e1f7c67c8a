"""The cache write against the specification, bit for bit, and its 8-bit forms."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import DEVICE, LARGEST_CODE, Case, build, empty_caches, quantize
from torch import Tensor

from pykv.attention import torch_backend
from pykv.kernels.arguments import Caches
from pykv.kernels.cache_format import CacheFormat
from pykv.kernels.target import INTERPRETER, Target
from pykv.kernels.write_kv import launch_write_kv


def poisoned(case: Case, num_blocks: int) -> Caches:
    caches = empty_caches(case, num_blocks)
    build(Case(rows=((1, 1),), cache=case.cache)).poison(caches)
    return caches


def raw(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("block_size", "head_dims"), [(1, (64, 64)), (16, (40, 24)), (17, (128, 128)), (48, (80, 256))]
)
def test_writes_what_the_specification_writes(
    dtype: torch.dtype, block_size: int, head_dims: tuple[int, int]
) -> None:
    case = Case(dtype=dtype, block_size=block_size, head_dim_k=head_dims[0], head_dim_v=head_dims[1])
    num_blocks = 200 // block_size + 2
    actual, expected = poisoned(case, num_blocks), poisoned(case, num_blocks)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator(DEVICE).manual_seed(1))[:77]
    slots[[0, 40, 76]] = -1
    key, value = (torch.randn(77, 3, 2, width).to(dtype)[:, 1] for width in head_dims)
    launch_write_kv(key, value, actual, slots)
    torch_backend.write_kv(key, value, expected.key, expected.value, slots)
    assert torch.equal(raw(actual.key), raw(expected.key))
    assert torch.equal(raw(actual.value), raw(expected.value))
    assert not actual.key.isnan().all()


def test_padding_writes_nothing_and_touches_no_live_block() -> None:
    case = Case(dtype=torch.bfloat16)
    caches = poisoned(case, 3)
    caches.key.zero_()
    caches.value.zero_()
    key = torch.ones(5, 2, 64, dtype=torch.bfloat16)
    launch_write_kv(key, key, caches, torch.tensor([5, -1, -1, 48, 1 << 40]))
    for cache in (caches.key, caches.value):
        assert (cache[0, :, 5] == 1).all()
        cache[0, :, 5] = 0
        assert (cache == 0).all()


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_codes_and_scales_are_the_specified_ones(cache: str, dtype: torch.dtype) -> None:
    case = Case(cache=cache, dtype=dtype, head_dim_k=48, head_dim_v=80, block_size=4)
    caches = poisoned(case, 8)
    slots = torch.tensor([4, 31, -1, 9, 17])
    key, value = torch.randn(5, 2, 48).to(dtype), torch.randn(5, 2, 80).to(dtype) * 100
    launch_write_kv(key, value, caches, slots)
    assert caches.scales is not None
    live = slots >= 0
    blocks, offsets = slots[live] // 4, slots[live] % 4
    for kind, (tokens, written) in enumerate(((key, caches.key), (value, caches.value))):
        codes, scales = quantize(tokens[live].float(), cache)
        assert torch.equal(written.view(torch.uint8)[blocks, :, offsets], codes.view(torch.uint8))
        assert torch.equal(caches.scales[blocks, kind, :, offsets], scales)
    assert int(caches.scales.isnan().sum()) == caches.scales.numel() - 4 * 2 * 2


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
def test_every_bfloat16_is_written_as_the_specification_says(cache: str) -> None:
    """Among them are NaN, infinities and numbers whose scale would be subnormal."""
    case = Case(cache=cache, dtype=torch.bfloat16, head_dim_k=32, block_size=16, num_kv_heads=1)
    actual, expected = poisoned(case, 128), poisoned(case, 128)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    tokens, slots = bits.view(torch.bfloat16).view(-1, 1, 32), torch.arange(2048)
    launch_write_kv(tokens, tokens, actual, slots)
    torch_backend.write_kv(tokens, tokens, expected.key, expected.value, slots, expected.scales)
    assert torch.equal(raw(actual.key), raw(expected.key))
    assert torch.equal(raw(actual.value), raw(expected.value))
    assert actual.scales is not None
    torch.testing.assert_close(actual.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert actual.scales.isnan().sum() == 2 * 8  # of 32 numbers each: 127 NaN of either sign


@pytest.mark.parametrize("cache", ["int8", "e4m3"])
def test_rows_of_one_value_have_usable_scales(cache: str) -> None:
    case = Case(cache=cache, dtype=torch.float32, head_dim_k=32, block_size=8)
    caches = poisoned(case, 1)
    rows = torch.stack([torch.full((32,), size) for size in (0.0, 3.0, 1e-8, 6e4, -1e30)])
    one_hot = torch.eye(32)[:2] * torch.tensor([[5.0], [-5e-5]])
    tokens = torch.cat([rows, one_hot])[:, None].expand(-1, 2, -1)
    launch_write_kv(tokens, tokens, caches, torch.arange(7))
    assert caches.scales is not None
    scales = caches.scales[0, 0, :, :7].T
    assert scales.isfinite().all()
    assert (scales > 0).all()
    restored = caches.key[0, :, :7].transpose(0, 1).double() * scales.double()[..., None]
    step = tokens.abs().amax(-1) / LARGEST_CODE[cache] * (1.0 if cache == "int8" else 32.0)
    assert ((restored - tokens).abs() <= 0.5001 * step[..., None]).all()
    assert (restored[tokens == 0] == 0).all()


def test_fp8_saturates_and_keeps_nan_in_hardware_and_in_software() -> None:
    # With 448 in the row the scale is 1, and every value below meets the encoder as it is.
    values = torch.tensor(
        [448.0, 0.0, -0.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 0.0156, 17.0, 19.0, -431.0, 440.0, 447.9]
    )
    tokens = torch.cat([values, -values, torch.zeros(8)])[None, None].expand(1, 2, -1).contiguous()
    expected = tokens.to(torch.float8_e4m3fn).view(torch.uint8)
    for form in (CacheFormat.E4M3_SOFTWARE, CacheFormat.E4M3_NATIVE):
        assert torch.equal(written_as(form, tokens), expected)
    with_nan = tokens.clone()
    with_nan[..., 5] = math.nan
    for form in (CacheFormat.E4M3_SOFTWARE, CacheFormat.E4M3_NATIVE):
        assert (written_as(form, with_nan)[..., 5] & 0x7F == 0x7F).all()


def written_as(form: CacheFormat, tokens: Tensor) -> Tensor:
    """The bytes of one token written with this encoder."""
    import pykv.kernels.write_kv as module

    caches = poisoned(Case(cache="e4m3", head_dim_k=32, block_size=1), 1)
    native = Target(
        "test", INTERPRETER.num_processors, INTERPRETER.shared_bytes, form is CacheFormat.E4M3_NATIVE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "current_target", lambda device: native)
        launch_write_kv(tokens, tokens, caches, torch.tensor([0]))
    return caches.key.view(torch.uint8)[:, :, 0]
