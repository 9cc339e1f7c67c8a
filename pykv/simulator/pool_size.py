"""How many blocks a pool of some bytes has."""

from __future__ import annotations

from pykv.errors import ConfigError
from pykv.field_checks import as_number_in
from pykv.kv_format import USUAL_HEAD_DIM, KvFormat
from pykv.simulator.served_model import ServedModel

__all__ = ["blocks_in"]


def blocks_in(
    memory_bytes: int,
    block_size: int,
    *,
    stored: ServedModel | float | None,
    kv_format: KvFormat,
) -> int:
    """The whole blocks that fit.

    Args:
        memory_bytes: of the pool.
        block_size: tokens a block.
        stored: the model whose tokens are stored, or the bytes of one of them in 16 bit and without scales.
        kv_format: of the pool.

    Raises:
        ConfigError: a value is not allowed, nothing says how much a token takes, or not one block fits.
    """
    if isinstance(stored, ServedModel):
        block_bytes: float = stored.block_bytes(block_size, kv_format)
    else:
        block_bytes = block_size * _bytes_per_token(stored, kv_format)
    if memory_bytes < block_bytes:
        raise ConfigError(
            f"kv_memory_bytes is {memory_bytes}: allowed is at least a block, which takes {block_bytes:.0f}"
        )
    return int(memory_bytes // block_bytes)


def _bytes_per_token(given: float | None, kv_format: KvFormat) -> float:
    if given is None:
        raise ConfigError(
            "kv_bytes_per_token is None: allowed with kv_memory_bytes where a model is named, by model or by cost"
        )
    number = as_number_in(
        "kv_bytes_per_token", given, 0.0, 1e12, ConfigError, above_low=True, below_high=True
    )
    # Of such a model the head size, and so how many scales there are, is not known.
    return number * kv_format.row_bytes(USUAL_HEAD_DIM) / (2 * USUAL_HEAD_DIM)
