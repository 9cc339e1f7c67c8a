"""What tests of several parts need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from pykv import CodecFormat, kv_format, register_kv_format

if TYPE_CHECKING:
    import torch

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # how long an example takes says nothing where the machine has other work


class FourBits(CodecFormat):
    """Two numbers a byte, from -7 to 7, times a float32 that stands in front of them."""

    name = "int4"

    def row_bytes(self, head_dim: int) -> int:
        return 4 + -(-head_dim // 2)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        rows = torch.nn.functional.pad(rows.float(), (0, rows.shape[-1] % 2))
        scales = (rows.abs().amax(dim=-1, keepdim=True) / 7).clamp(min=1e-30)
        numbers = (rows / scales).round().to(torch.int16) + 8
        codes = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
        return torch.cat([scales.view(torch.uint8), codes], dim=-1)

    def decode(self, codes: torch.Tensor, head_dim: int) -> torch.Tensor:
        import torch

        scales = codes[..., :4].contiguous().view(torch.float32)
        pairs = codes[..., 4:].to(torch.int16)
        numbers = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)[..., :head_dim] - 8
        return numbers * scales


@pytest.fixture
def four_bits() -> Iterator[FourBits]:
    """A format from outside pykv, registered as "int4" for one test."""
    added = FourBits()
    register_kv_format(added)
    yield added
    del kv_format._formats[added.name]
