"""How many blocks a pool of some bytes has."""

from __future__ import annotations

from pykv.errors import ConfigError
from pykv.kv_format import USUAL_HEAD_DIM, KvFormat, kv_format_of
from pykv.simulator.cost import DEFAULT_COST, CostModel, kv_of_cost

__all__ = ["DEFAULT_DTYPE", "blocks_in"]

DEFAULT_DTYPE = "bfloat16"


def blocks_in(
    memory_bytes: int,
    block_size: int,
    *,
    cost: str | CostModel | None,
    bytes_per_token: float | None = None,
    dtype: str | None = None,
) -> int:
    """The whole blocks that fit.

    Args:
        memory_bytes: of the pool.
        block_size: tokens a block.
        cost: of the replay; the model that it names is the one whose tokens are stored; None: the default.
        bytes_per_token: in 16 bit and without scales, in the place of that model.
        dtype: of the pool, the name of a `KvFormat` or a dtype; None: `DEFAULT_DTYPE`.

    Raises:
        ConfigError: a value is not allowed, nothing says how much a token takes, or not one block fits.
    """
    if type(memory_bytes) is not int or memory_bytes < 1:
        raise ConfigError(f"kv_memory_bytes is {memory_bytes!r}: allowed is a whole number above 0")
    form = kv_format_of(DEFAULT_DTYPE if dtype is None else dtype)
    block_bytes = block_size * _bytes_per_token(form, bytes_per_token, cost)
    if memory_bytes < block_bytes:
        raise ConfigError(
            f"kv_memory_bytes is {memory_bytes}: allowed is at least a block, which takes {block_bytes:.0f}"
        )
    return int(memory_bytes // block_bytes)


def _bytes_per_token(form: KvFormat, given: float | None, cost: str | CostModel | None) -> float:
    if given is None:
        cost = DEFAULT_COST if cost is None else cost
        named = kv_of_cost(cost) if isinstance(cost, str) else None
        if named is None:
            raise ConfigError(
                f"kv_bytes_per_token is None: allowed with kv_memory_bytes where the cost names a model, and "
                f"{cost!r} names none"
            )
        if not isinstance(named, float):
            return named.bytes_per_token(form)
        given = named
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e12:
        raise ConfigError(f"kv_bytes_per_token is {given!r}: allowed is above 0 and below 1e12")
    # Of such a model the head size, and so how many scales there are, is not known.
    return given * form.row_bytes(USUAL_HEAD_DIM) / (2 * USUAL_HEAD_DIM)
