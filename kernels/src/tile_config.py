"""Tile sizes of the attention kernels: a static table, and a rule for what it does not list.

A table, because benchmarking inside a call would break the capture of CUDA graphs, and the interpreter.
`benches/gpu/tune.py` measures on a GPU and writes the table anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykv.kernels.target import Target
from pykv.kernels.tile_table import DECODE, PREFILL

__all__ = ["TileConfig", "TileShape", "decode_config", "prefill_config"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one launch cuts its work.

    Attributes:
        rows: query rows (tokens times heads of a group) of one program.
        tile: keys of one step of its loop.
        num_warps, num_stages: warps of a program, and loads in flight plus one.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a choice depends on.

    Attributes:
        head_dim: the larger of the padded head sizes.
        element_bytes: bytes of one cache element.
        rows: the fewest query rows that a program must hold.
    """

    head_dim: int
    element_bytes: int
    rows: int


def decode_config(target: Target, shape: TileShape) -> TileConfig:
    """The tiles of a decode: its rows are one token's heads of one KV head."""
    tile, num_warps, num_stages = DECODE.get((target.name, shape.head_dim, shape.element_bytes), (64, 4, 3))
    return fitting(target, shape, TileConfig(shape.rows, tile, num_warps, num_stages))


def prefill_config(target: Target, shape: TileShape, num_rows: int) -> TileConfig:
    """The tiles of a prefill whose batch rows have `num_rows` query rows on average."""
    rows, tile, num_warps, num_stages = PREFILL.get(
        (target.name, shape.head_dim, shape.element_bytes), (128, 64, 8, 3)
    )
    while rows > 64 and rows // 2 >= max(num_rows, shape.rows):
        rows, num_warps = rows // 2, max(4, num_warps // 2)
    return fitting(target, shape, TileConfig(max(rows, shape.rows), tile, num_warps, num_stages))


def fitting(target: Target, shape: TileShape, config: TileConfig) -> TileConfig:
    """The config, with less in flight and then smaller tiles until it fits the target's shared memory."""
    while shared_bytes(shape, config) > target.shared_bytes:
        if config.num_stages > 2:
            config = TileConfig(config.rows, config.tile, config.num_warps, config.num_stages - 1)
        elif config.tile > 16:
            config = TileConfig(config.rows, config.tile // 2, config.num_warps, config.num_stages)
        else:
            break
    return config


def shared_bytes(shape: TileShape, config: TileConfig) -> int:
    """An upper estimate of the shared memory: the queries, and a tile of keys and of values for each load in flight."""
    in_flight = config.num_stages * config.tile * 2 * shape.head_dim * shape.element_bytes
    return in_flight + config.rows * shape.head_dim * 2
