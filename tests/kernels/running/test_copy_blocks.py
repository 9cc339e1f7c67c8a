"""Block copies, bit for bit."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE, Case, empty_caches

from pykv.kernels.arguments import Caches
from pykv.kernels.copy_blocks import launch_copy_blocks

CASES = {
    "bfloat16": Case(dtype=torch.bfloat16, block_size=48, head_dim_k=80, head_dim_v=24),
    "float32": Case(block_size=1),
    "int8": Case(cache="int8", block_size=17, head_dim_k=40),
    "e4m3": Case(cache="e4m3", block_size=64, head_dim_k=128),
}


def random_caches(case: Case, num_blocks: int, seed: int) -> Caches:
    caches = empty_caches(case, num_blocks)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for cache in (caches.key, caches.value):
        raw = cache.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    if caches.scales is not None:
        caches.scales.uniform_(generator=generator)
    return caches


def contents(caches: Caches) -> list[torch.Tensor]:
    scales = [] if caches.scales is None else [caches.scales.clone()]
    return [caches.key.contiguous().view(torch.uint8), caches.value.contiguous().view(torch.uint8), *scales]


@pytest.mark.parametrize("name", CASES)
def test_copies_whole_blocks_and_nothing_else(name: str) -> None:
    caches = random_caches(CASES[name], 9, seed=0)
    expected = contents(caches)
    for part in expected:
        part[[4, 8]] = part[[2, 1]]
    launch_copy_blocks(caches, caches, torch.tensor([[2, 4], [-1, 3], [5, -1], [1, 8], [9, 0], [0, 9]]))
    for actual, part in zip(contents(caches), expected, strict=True):
        assert torch.equal(actual, part)


@pytest.mark.parametrize("name", CASES)
def test_moves_blocks_between_pools_of_different_sizes(name: str) -> None:
    source, target = random_caches(CASES[name], 5, seed=1), random_caches(CASES[name], 3, seed=2)
    expected = contents(target)
    for part, moved in zip(expected, contents(source), strict=True):
        part[[2, 0]] = moved[[4, 1]]
    launch_copy_blocks(source, target, torch.tensor([[4, 2], [1, 0], [0, 3]]))
    for actual, part in zip(contents(target), expected, strict=True):
        assert torch.equal(actual, part)
