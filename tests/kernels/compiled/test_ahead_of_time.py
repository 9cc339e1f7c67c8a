"""Every launcher compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_ahead import TARGETS, Resources, compiling_for, resources
from launch_matrix import Setting, absent_caches, compile_attention, compile_moves, production_settings

from pykv.kernels.target import current_target

LLAMA = Setting()
FP8 = Setting(cache=torch.float8_e4m3fn)
DECODE_SPILLS = 8  # bytes a thread
PREFILL_SPILLS = 64


def checked(target: str, kernels: Iterable[Any]) -> list[Resources]:
    """The kernels' resources, within what the target has."""
    with compiling_for(target):
        limit = current_target(torch.device("meta")).shared_bytes
    needs = [resources(kernel) for kernel in kernels]
    assert needs
    for need in needs:
        assert need.shared_bytes <= limit, need
        assert need.spilled_bytes <= (PREFILL_SPILLS if "prefill" in need.kernel else DECODE_SPILLS), need
    return needs


@pytest.mark.parametrize(
    ("target", "setting"),
    [("sm_80", FP8), ("sm_90", LLAMA), ("sm_90", FP8), ("sm_100", LLAMA), ("gfx942", LLAMA)],
)
def test_a_decode_step_compiles_and_fits(target: str, setting: Setting) -> None:
    needs = checked(target, compile_attention(target, setting, num_tokens=8))
    assert [need.kernel for need in needs] == ["decode_kernel", "decode_reduce_kernel"]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_step_that_shares_a_prefix_compiles_and_fits(target: str) -> None:
    needs = checked(target, compile_attention(target, LLAMA, num_tokens=8, share_prefixes=True))
    names = [need.kernel for need in needs]
    assert names == ["find_prefixes_kernel", "shared_prefix_kernel", "decode_kernel", "decode_reduce_kernel"]


def test_a_mixed_step_compiles_and_fits_and_uses_the_warp_group_units() -> None:
    kernels = compile_attention("sm_90", LLAMA, num_tokens=4096)
    names = [need.kernel for need in checked("sm_90", kernels)]
    assert names == ["prefill_kernel", "decode_kernel", "decode_reduce_kernel"]
    assert "wgmma.mma_async" in kernels[0].asm["ptx"]


def test_cache_moves_compile_and_fit() -> None:
    names = [need.kernel for need in checked("sm_90", compile_moves("sm_90", FP8))]
    assert names == ["write_kv_kernel", "copy_blocks_kernel"]


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_a_decode_keeps_two_tiles_in_flight(block_size: int) -> None:
    setting = dataclasses.replace(LLAMA, block_size=block_size)
    kernel = compile_attention("sm_90", setting, num_tokens=8)[0]
    tile_bytes = 64 * (128 + 128) * 2
    assert resources(kernel).shared_bytes >= 2 * tile_bytes


def test_8_bit_caches_that_cannot_be_read_in_words_are_refused() -> None:
    setting = dataclasses.replace(LLAMA, cache=torch.int8, head_dim_k=90, head_dim_v=90)
    with pytest.raises(ValueError, match=r"head size 90.*multiples of 4"):
        compile_attention("sm_90", setting, num_tokens=8)


def test_head_sizes_that_do_not_fit_are_refused_with_numbers() -> None:
    setting = dataclasses.replace(LLAMA, head_dim_k=4096, head_dim_v=4096)
    with pytest.raises(ValueError, match=r"head size 4096.*bytes of shared memory; gfx942 has 65536"):
        compile_attention("gfx942", setting, num_tokens=8)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_and_fits(target: str, record_property: Any) -> None:
    """With PYKV_KERNEL_TABLE naming a file, what each kernel needs is appended to it, one JSON object a line."""
    lines = []
    for setting in production_settings():
        assert absent_caches(setting).key.shape[0] == 200_000
        kernels = [*compile_moves(target, setting)]
        for num_tokens, share_prefixes in ((8, False), (8, True), (4096, False)):
            kernels += compile_attention(target, setting, num_tokens, share_prefixes=share_prefixes)
        for need in (resources(kernel) for kernel in kernels):
            described = {name: str(value) for name, value in vars(setting).items()}
            lines.append(json.dumps({**described, **dataclasses.asdict(need), "target": target}))
        if "PYKV_KERNEL_TABLE" in os.environ:
            with Path(os.environ["PYKV_KERNEL_TABLE"]).open("a") as table:
                table.write("\n".join(lines) + "\n")
            lines = []
        checked(target, kernels)
