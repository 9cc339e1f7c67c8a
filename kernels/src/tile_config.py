"""Tile sizes of the attention kernels: a static table, and a rule for what it does not list.

A table, because benchmarking inside a call would break the capture of CUDA graphs, and the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pykv.kernels.target import Target
from pykv.kernels.tile_table import DECODE, PREFILL

__all__ = ["TileConfig", "TileShape", "decode_config", "prefill_config", "prefix_config"]

_FEWEST_ROWS = 64  # below that a prefill would leave the matrix units of one warp group idle
_SMALLEST_TILE = 16


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
    keys = table_keys(target, shape)
    listed = next((DECODE[key] for key in keys if key in DECODE), None)
    tile, num_warps, num_stages = listed or (_SMALLEST_TILE if shape.head_dim > 128 else 64, 4, 2)
    if shape.rows > 16 and target.family == "sm":  # the table is for the least that a product takes
        num_warps = max(8, num_warps)
    return fitting(target, shape, TileConfig(shape.rows, tile, num_warps, num_stages))


def prefill_config(target: Target, shape: TileShape, num_rows: int) -> TileConfig:
    """The tiles of a prefill whose batch rows have `num_rows` query rows on average."""
    keys = table_keys(target, shape)
    listed = next((PREFILL[key] for key in keys if key in PREFILL), None)
    config = TileConfig(*(listed or (16 if shape.head_dim > 128 else 64, _SMALLEST_TILE, 4, 2)))
    # Wider sums, and tiles that are decoded, do not fit the registers of four warps.
    fewest_warps = 4 if shape.head_dim <= 128 and shape.element_bytes > 1 else 8
    while config.rows > _FEWEST_ROWS and config.rows // 2 >= num_rows:
        num_warps = min(config.num_warps, max(fewest_warps, config.num_warps // 2))
        config = replace(config, rows=config.rows // 2, num_warps=num_warps)
    return fitting(target, shape, replace(config, rows=max(config.rows, shape.rows)))


def prefix_config(target: Target, shape: TileShape) -> TileConfig:
    """The tiles of what reads a shared prefix: a prefill's, with as many rows as one warp group multiplies at once."""
    return prefill_config(target, shape, _FEWEST_ROWS)


def table_keys(target: Target, shape: TileShape) -> tuple[tuple[str, int, int], ...]:
    """Where the tables may list a choice, the most specific place first."""
    return tuple((name, shape.head_dim, shape.element_bytes) for name in (target.name, target.family))


def fitting(target: Target, shape: TileShape, config: TileConfig) -> TileConfig:
    """The config, with less in flight and then smaller tiles until it fits the target's shared memory.

    Raises:
        ValueError: not even the smallest tiles fit.
    """
    while shared_bytes(shape, config) > target.shared_bytes:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.tile > _SMALLEST_TILE:
            config = replace(config, tile=config.tile // 2)
        else:
            raise ValueError(
                f"head size {shape.head_dim} (padded) with {shape.rows} query rows needs "
                f"{shared_bytes(shape, config)} bytes of shared memory; {target.name} has {target.shared_bytes}"
            )
    return config


def shared_bytes(shape: TileShape, config: TileConfig) -> int:
    """An upper estimate of the shared memory: the queries, and a tile of keys and of values for each load in flight.

    8-bit tiles are also held as float16 while they are multiplied.
    """
    tile_bytes = 2 * config.tile * shape.head_dim * shape.element_bytes
    decoded_bytes = 2 * config.tile * shape.head_dim * 2 if shape.element_bytes == 1 else 0
    query_bytes = config.rows * shape.head_dim * max(2, shape.element_bytes)
    in_flight = max(1, config.num_stages - 1)
    return in_flight * tile_bytes + decoded_bytes + query_bytes
