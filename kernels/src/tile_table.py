"""Tile sizes by (target, padded head size, bytes of a cache element); `benches/gpu/tune.py` writes this file."""

from __future__ import annotations

__all__ = ["DECODE", "PREFILL"]

# (tile, num_warps, num_stages)
DECODE: dict[tuple[str, int, int], tuple[int, int, int]] = {}

# (rows, tile, num_warps, num_stages)
PREFILL: dict[tuple[str, int, int], tuple[int, int, int, int]] = {}
