"""The mended interpreter against torch: on every bfloat16, every fp8 code, and what hides between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from faithful_interpreter import convert_float


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, sum_ptr, product_ptr, less_ptr, SIZE: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + lane), tl.load(y_ptr + lane)
    tl.store(sum_ptr + lane, x + y)
    tl.store(product_ptr + lane, x * y)
    tl.store(less_ptr + lane, (x < y).to(tl.int8))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, SIZE)
    place = lane[:, None] * SIZE + lane[None, :]
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place)))


@triton.jit
def convert_kernel(source_ptr, target_ptr, SIZE: tl.constexpr):  # noqa: N803
    lane = tl.arange(0, SIZE)
    tl.store(target_ptr + lane, tl.load(source_ptr + lane).to(target_ptr.dtype.element_ty))


def test_bfloat16_arithmetic_is_torchs() -> None:
    x, y = torch.randn(512).bfloat16(), torch.randn(512).bfloat16()
    total, product, less = torch.empty_like(x), torch.empty_like(x), torch.empty(512, dtype=torch.int8)
    arithmetic_kernel[(1,)](x, y, total, product, less, SIZE=512)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    assert torch.equal(less, (x < y).to(torch.int8))


def test_bfloat16_products_accumulate_in_float32() -> None:
    a, b = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_conversions_round_to_nearest_even_and_saturate_where_hardware_does(target: torch.dtype) -> None:
    source = torch.cat(
        [torch.randn(4000) * 10.0 ** torch.randint(-6, 6, (4000,)), torch.tensor([0.0, 448.0, 464.0, 1e6])]
    )
    source = torch.cat([source, -source, torch.zeros(184)])
    wide = source.clamp(-448, 448) if target == torch.float8_e4m3fn else source
    out = torch.empty(8192, dtype=target)
    convert_kernel[(1,)](source, out, SIZE=8192)
    assert torch.equal(out.view(torch.uint8), wide.to(target).view(torch.uint8))


def test_every_fp8_code_widens_to_its_value() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(256, dtype=torch.float16)
    convert_kernel[(1,)](codes, out, SIZE=256)
    torch.testing.assert_close(out, codes.half(), rtol=0, atol=0, equal_nan=True)


def test_a_conversion_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="conversion from"):
        convert_float(np.zeros(1, np.uint8), tl.float8e4b15, tl.float32)
