"""Device functions that find things: the slots of a tile of positions, rows of a cache, the batch row of a token."""
# mypy: allow-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "blocks_of_tile",
    "keys_of_token",
    "last_row_from",
    "load_columns",
    "load_rows",
    "offsets_of_tile",
    "row_of_token",
]


@triton.jit
def blocks_of_tile(table_ptr, tile, begin, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block ids (int32) of the positions tile * TILE + [0, TILE): a scalar where a tile lies inside one block.

    Only table entries of positions in [begin, end) are read.
    """
    lane = tl.arange(0, TILE)
    position = tile * TILE + lane
    live = (position >= begin) & (position < end)
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + tile // (BLOCK_SIZE // TILE), mask=tile * TILE < end, other=0)
    elif TILE % BLOCK_SIZE == 0:
        return tl.load(table_ptr + tile * (TILE // BLOCK_SIZE) + lane // BLOCK_SIZE, mask=live, other=0)
    else:
        return tl.load(table_ptr + position // BLOCK_SIZE, mask=live, other=0)


@triton.jit
def offsets_of_tile(tile, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The offsets, inside their blocks, of the positions tile * TILE + [0, TILE)."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        return tile % (BLOCK_SIZE // TILE) * TILE + lane
    elif TILE % BLOCK_SIZE == 0:
        return lane % BLOCK_SIZE
    else:
        return (tile * TILE + lane) % BLOCK_SIZE


@triton.jit
def load_columns(base_ptr, row_offsets, live, column, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, columns]: one element for each row offset and each of `column`; dead rows and columns from WIDTH on are
    zero and never read. WHOLE says that no column is WIDTH or more."""
    mask = live[:, None] if WHOLE else live[:, None] & (column < WIDTH)[None, :]
    mask = tl.broadcast_to(mask, row_offsets.shape[0], column.shape[0])
    zero: tl.constexpr = 0.0 if base_ptr.dtype.element_ty.is_floating() else 0
    return tl.load(base_ptr + row_offsets[:, None] + column[None, :], mask=mask, other=zero)


@triton.jit
def load_rows(base_ptr, row_offsets, live, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED]: WIDTH elements from each row offset; dead rows and padding are zero and never read."""
    return load_columns(base_ptr, row_offsets, live, tl.arange(0, PADDED), WIDTH, WIDTH == PADDED)


@triton.jit
def last_row_from(starts_ptr, value, num_rows, STRIDE: tl.constexpr):
    """The last row i in [0, num_rows] with starts[i] // STRIDE + i * (STRIDE > 1) <= value, by bisection.

    With STRIDE 1 that is the row that holds token `value`. With more it is the row of query block `value` where each
    row's blocks of STRIDE tokens are numbered from starts[i] // STRIDE + i: numbers that never collide.
    """
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts_ptr + middle) // STRIDE
        if STRIDE > 1:
            first += middle
        if first <= value:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def row_of_token(starts_ptr, token, num_rows):
    """The batch row that holds a token, or num_rows if none does. One look where every row has one token."""
    row = tl.minimum(token, num_rows - 1)
    if (tl.load(starts_ptr + row) != token) | (tl.load(starts_ptr + row + 1) <= token):
        row = last_row_from(starts_ptr, token, num_rows, 1)
    return row


@triton.jit
def keys_of_token(starts_ptr, seq_lens_ptr, table_rows_ptr, row, token, num_rows, capacity):
    """How many keys a token sees (0 for a token of no row or of an empty row), and its row of the block tables.

    Never more than `capacity`, the positions that a table row has: a wrong length reads no foreign memory.
    """
    exists = row < num_rows
    end = tl.load(starts_ptr + row + 1, mask=exists, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=exists, other=0)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row, mask=exists, other=0)
    length = tl.where(exists, seq_len - (end - 1 - token), 0)
    return tl.minimum(tl.maximum(length, 0), capacity), table_row
