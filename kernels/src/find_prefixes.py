"""Finds decodes whose tables begin with the same blocks; a grid of (row).

Rows are sorted by their first block, so that those that begin alike stand together: a family. How far a row shares is
told by comparing its table with that of its family's first row (the first row's with the second's).
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pykv.kernels.arguments import Batch, Rule

__all__ = ["FEWEST_SHARED", "find_prefixes"]

FEWEST_SHARED = 256  # keys; what is shared less is not worth a program of its own
_CHUNK = 128  # rows, or columns of a table, that are looked at together

NO_BLOCK = tl.constexpr(2**31 - 1)


def find_prefixes(
    prefixes: Tensor, batch: Batch, rule: Rule, block_size: int, unit: int, fewest: int = FEWEST_SHARED
) -> None:
    """Fills `prefixes`, int32 [3, num_rows]: the rows family by family; each one's place in its family; and, by row,
    how many keys it shares, a multiple of `unit`, 0 where it has more or fewer than one token, or begins alone.

    Where a window is given, only rows that it does not shorten share.
    """
    find_prefixes_kernel[(batch.num_rows,)](
        prefixes,
        batch.block_tables,
        batch.seq_lens,
        batch.query_starts,
        batch.table_rows,
        batch.num_rows,
        batch.num_columns,
        rule.window,
        batch.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        FEWEST=max(fewest, unit),
        UNIT=unit,
        HAS_WINDOW=rule.window > 0,
        CHUNK=_CHUNK,
        enable_fp_fusion=True,
        num_warps=1,
    )


@triton.jit
def first_block(
    block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, row, num_rows, capacity, window,
    table_stride, FEWEST: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """A row's first block (NO_BLOCK if it cannot share), its length and its table row; of one row or several."""
    exists = row < num_rows
    begin = tl.load(query_starts_ptr + row, mask=exists, other=0)
    end = tl.load(query_starts_ptr + row + 1, mask=exists, other=0)
    length = tl.minimum(tl.load(seq_lens_ptr + row, mask=exists, other=0), capacity)
    table_row = row
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row, mask=exists, other=0)
    may_share = (end - begin == 1) & (length >= FEWEST)
    if HAS_WINDOW:
        may_share = may_share & (length <= window)
    first = tl.load(block_tables_ptr + table_row.to(tl.int64) * table_stride, mask=may_share, other=NO_BLOCK)
    return first, length, table_row


@triton.jit(do_not_specialize=["num_rows"])
def find_prefixes_kernel(
    prefixes_ptr, block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr,
    num_rows, num_columns, window, table_stride,
    BLOCK_SIZE: tl.constexpr, FEWEST: tl.constexpr, UNIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    capacity = num_columns * BLOCK_SIZE
    first, length, table_row = first_block(
        block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, row, num_rows, capacity, window,
        table_stride, FEWEST, HAS_WINDOW,
    )  # fmt: skip
    num_before = row * 0
    rank = row * 0
    partner = num_rows
    for chunk in range(0, num_rows, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        other_first, _, _ = first_block(
            block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, other, num_rows, capacity, window,
            table_stride, FEWEST, HAS_WINDOW,
        )  # fmt: skip
        exists = other < num_rows
        is_family = exists & (other_first == first)
        num_before += tl.sum((exists & (other_first < first)).to(tl.int32), 0)
        rank += tl.sum((is_family & (other < row)).to(tl.int32), 0)
        partner = tl.minimum(partner, tl.min(tl.where(is_family & (other != row), other, num_rows), 0))

    shared = row * 0
    if (first != NO_BLOCK) & (partner < num_rows):
        _, partner_length, partner_row = first_block(
            block_tables_ptr, seq_lens_ptr, query_starts_ptr, table_rows_ptr, partner, num_rows, capacity, window,
            table_stride, FEWEST, HAS_WINDOW,
        )  # fmt: skip
        table_ptr = block_tables_ptr + table_row.to(tl.int64) * table_stride
        partner_ptr = block_tables_ptr + partner_row.to(tl.int64) * table_stride
        limit = tl.minimum(length, partner_length) // BLOCK_SIZE
        same = limit  # columns from 0 that are equal, as far as was looked
        begin = 0
        while begin < same:
            column = begin + tl.arange(0, CHUNK)
            blocks = tl.load(table_ptr + column, mask=column < limit, other=0)
            partner_blocks = tl.load(partner_ptr + column, mask=column < limit, other=0)
            same = tl.minimum(same, tl.min(tl.where(blocks != partner_blocks, column, limit), 0))
            begin += CHUNK
        shared = same * BLOCK_SIZE // UNIT * UNIT
        shared = tl.where(shared >= FEWEST, shared, 0)
    place = num_before + rank
    tl.store(prefixes_ptr + place, row)
    tl.store(prefixes_ptr + num_rows + place, rank)
    tl.store(prefixes_ptr + 2 * num_rows + row, shared)
