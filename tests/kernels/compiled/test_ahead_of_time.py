"""Every launcher compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import launch_matrix
import pytest
import torch
from compile_ahead import TARGETS, Resources, compiling_for, resources
from launch_matrix import (
    FACTORS,
    Setting,
    absent_caches,
    compile_attention,
    compile_moves,
    production_settings,
)

from pykv.kernels.target import current_target

LLAMA = Setting()
FP8 = Setting(cache=torch.float8_e4m3fn)
MIXED = Setting(num_tokens=4096)
SHARING = Setting(share_prefixes=True)
SETTINGS = production_settings()
PARTS = 4  # of the settings, each a test
DECODE_SPILLS = 8  # bytes a thread
PREFILL_SPILLS = 64
MANY_ROWS = ("prefill_kernel", "shared_prefix_kernel")


def checked(target: str, kernels: Iterable[Any], *, spills_count: bool = True) -> list[Resources]:
    """The kernels' resources, within what the target has."""
    with compiling_for(target):
        limit = current_target(torch.device("meta")).shared_bytes
    needs = [resources(kernel) for kernel in kernels]
    assert needs
    for need in needs:
        assert need.shared_bytes <= limit, need
        allowed = PREFILL_SPILLS if need.kernel in MANY_ROWS else DECODE_SPILLS
        assert need.spilled_bytes <= allowed or not spills_count, need
    return needs


def spills_are_limited(setting: Setting) -> bool:
    """float32 with wide heads is right and slow: docs/kernels.md says so."""
    return setting.query is not torch.float32 or max(setting.head_dim_k, setting.head_dim_v) <= 128


def is_refused(target: str, setting: Setting) -> bool:
    """Heads of 512 whose queries and smallest tiles are more than the 64 KiB of shared memory of that target."""
    if target != "gfx942" or max(setting.head_dim_k, setting.head_dim_v) <= 256:
        return False
    return setting.query is torch.float32 or (setting.cache.itemsize == 1 and setting.group > 16)


@pytest.mark.parametrize(
    ("target", "setting"),
    [("sm_80", FP8), ("sm_90", LLAMA), ("sm_90", FP8), ("sm_100", LLAMA), ("gfx942", LLAMA)],
)
def test_a_decode_step_compiles_and_fits(target: str, setting: Setting) -> None:
    needs = checked(target, compile_attention(target, setting))
    assert [need.kernel for need in needs] == ["decode_kernel", "decode_reduce_kernel"]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_step_that_shares_a_prefix_compiles_and_fits(target: str) -> None:
    names = [need.kernel for need in checked(target, compile_attention(target, SHARING))]
    assert names == ["find_prefixes_kernel", "shared_prefix_kernel", "decode_kernel", "decode_reduce_kernel"]


def test_a_mixed_step_compiles_and_fits_and_uses_the_warp_group_units() -> None:
    kernels = compile_attention("sm_90", MIXED)
    names = [need.kernel for need in checked("sm_90", kernels)]
    assert names == ["prefill_kernel", "decode_kernel", "decode_reduce_kernel"]
    assert "wgmma.mma_async" in kernels[0].asm["ptx"]


def test_cache_moves_compile_and_fit() -> None:
    names = [need.kernel for need in checked("sm_90", compile_moves("sm_90", FP8))]
    assert names == ["write_kv_kernel", "copy_blocks_kernel"]


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_a_decode_keeps_two_tiles_in_flight(block_size: int) -> None:
    setting = dataclasses.replace(LLAMA, block_size=block_size)
    kernel = compile_attention("sm_90", setting)[0]
    tile_bytes = 64 * (128 + 128) * 2
    assert resources(kernel).shared_bytes >= 2 * tile_bytes


def test_a_decode_is_compiled_once_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server would stand still for seconds whenever a batch has a size that it never had."""
    kernels = []
    for num_rows in (1, 2, 3, 16, 100):
        monkeypatch.setattr(launch_matrix, "NUM_ROWS", num_rows)
        shares = num_rows > 1
        setting = dataclasses.replace(LLAMA, num_tokens=num_rows, share_prefixes=shares)
        kernels += compile_attention("sm_90", setting)
    codes = {
        (kernel.metadata.name, kernel.hash)
        for kernel in kernels
        if kernel.metadata.name != "decode_reduce_kernel"
    }
    assert sorted(name for name, _ in codes) == [
        "decode_kernel",  # of a row alone, which has no share
        "decode_kernel",
        "find_prefixes_kernel",
        "shared_prefix_kernel",
    ]


def test_8_bit_caches_that_cannot_be_read_in_words_are_refused() -> None:
    setting = dataclasses.replace(LLAMA, cache=torch.int8, head_dim_k=90, head_dim_v=90)
    with pytest.raises(ValueError, match=r"head size 90.*multiples of 4"):
        compile_attention("sm_90", setting)


def test_head_sizes_that_do_not_fit_are_refused_with_numbers() -> None:
    setting = dataclasses.replace(LLAMA, head_dim_k=4096, head_dim_v=4096)
    with pytest.raises(ValueError, match=r"head size 4096.*bytes of shared memory; gfx942 has 65536"):
        compile_attention("gfx942", setting)


def test_every_two_choices_of_the_launchers_meet_in_the_matrix() -> None:
    for (one, firsts), (other, seconds) in itertools.combinations(FACTORS.items(), 2):
        met = {
            (tuple(getattr(setting, name) for name in one), tuple(getattr(setting, name) for name in other))
            for setting in SETTINGS
        }
        assert met == set(itertools.product(firsts, seconds))
    assert {setting.cache for setting in SETTINGS} == {
        query_cache[1] for query_cache in FACTORS["query", "cache"]
    }


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_and_fits(target: str, part: int) -> None:
    """With PYKV_KERNEL_TABLE naming a file, what each kernel needs is appended to it, one JSON object a line."""
    for setting in SETTINGS[part::PARTS]:
        assert absent_caches(setting).key.shape[0] == 200_000
        kernels = compile_moves(target, setting)
        if is_refused(target, setting):
            with pytest.raises(ValueError, match="bytes of shared memory"):
                compile_attention(target, setting)
        else:
            kernels += compile_attention(target, setting)
        if "PYKV_KERNEL_TABLE" in os.environ:
            described = {name: str(value).removeprefix("torch.") for name, value in vars(setting).items()}
            with Path(os.environ["PYKV_KERNEL_TABLE"]).open("a") as table:
                for need in map(resources, kernels):
                    line = {**described, **dataclasses.asdict(need), "target": target}
                    table.write(json.dumps(line) + "\n")
        checked(target, kernels, spills_count=spills_are_limited(setting))
