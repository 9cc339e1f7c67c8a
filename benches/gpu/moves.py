"""How fast are the cache write and the block copy, beside a plain copy of the same bytes?

Run: benches/gpu/moves.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import torch
from machine import Part, open_part
from paged_problem import CACHE_TYPES, Shape, poisoned_caches

from pykv.kernels import operators


def write(part: Part, cache: str, num_tokens: int) -> None:
    """One layer's write of num_tokens tokens to scattered slots."""
    case = f"write {num_tokens} tokens {cache}"
    shape = Shape((), cache, num_kv_heads=2 if part.machine.dry else 8)
    device = part.machine.device
    caches = poisoned_caches(shape, 2 * num_tokens // 16 + 2, device)
    slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens] + 16
    key = torch.randn(num_tokens, shape.num_kv_heads, 128, device=device).bfloat16()

    def call() -> None:
        operators.write_kv(key, key, caches.key, caches.value, caches.scales, slots)

    call()
    if part.slice is not None:
        return
    moved = 2 * key.numel() * (2 + CACHE_TYPES[cache].itemsize)
    seconds = part.machine.seconds([call], rounds=15)
    part.report.add(case, "time", seconds * 1e6, "us", 15)
    part.report.add(case, "bandwidth", moved / seconds / 1e9, "GB/s", 15)


def copy(part: Part, cache: str, num_pairs: int) -> None:
    """One layer's copy of num_pairs blocks of 16 tokens."""
    case = f"copy {num_pairs} blocks {cache}"
    shape = Shape((), cache, num_kv_heads=2 if part.machine.dry else 8)
    device = part.machine.device
    caches = poisoned_caches(shape, 2 * num_pairs + 1, device)
    pairs = (torch.randperm(2 * num_pairs, device=device) + 1).view(num_pairs, 2)

    def call() -> None:
        operators.copy_blocks(caches.key, caches.value, caches.scales, pairs)

    call()
    if part.slice is not None:
        return
    same = torch.equal(*(caches.key[pairs[:, side]].view(torch.uint8) for side in (0, 1)))
    part.report.add(case, "equal", same, "bool")
    moved = 2 * num_pairs * caches.key[0].numel() * 2 * caches.key.element_size()
    seconds = part.machine.seconds([call], rounds=15)
    part.report.add(case, "time", seconds * 1e6, "us", 15)
    part.report.add(case, "bandwidth", moved / seconds / 1e9, "GB/s", 15)


if __name__ == "__main__":
    opened = open_part("moves")
    sizes = (5,) if opened.machine.dry else (64, 8192)
    runs = {f"write {size} {cache}": (write, cache, size) for size in sizes for cache in CACHE_TYPES}
    runs |= {f"copy {size} {cache}": (copy, cache, size) for size in sizes for cache in ("bf16", "fp8")}
    for name in opened.cases(list(runs)):
        run, *arguments = runs[name]
        opened.attempt(name, lambda run=run, arguments=arguments: run(opened, *arguments))
