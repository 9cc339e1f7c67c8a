"""Checks of what index tensors hold. They read the values, so they serve only tensors in host memory."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def check_rows(
    num_tokens: int, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor, table_rows: Tensor | None
) -> None:
    """Raises ValueError unless the query ranges, lengths and table rows fit each other."""
    starts = query_starts.tolist()
    if starts[0] != 0 or starts[-1] > num_tokens or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"query_starts must rise from 0 to at most {num_tokens}, the number of query tokens")
    rows = range(len(starts) - 1) if table_rows is None else table_rows.tolist()
    for index, (row, length) in enumerate(zip(rows, seq_lens.tolist(), strict=True)):
        if not 0 <= row < block_tables.shape[0]:
            raise ValueError(f"table_rows[{index}] is {row}; block_tables has {block_tables.shape[0]} rows")
        num_queries = starts[index + 1] - starts[index]
        if length < 0 or 0 < length < num_queries:
            raise ValueError(f"seq_lens[{index}] is {length}; the row has {num_queries} query tokens")


def check_tables(
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    window: int | None,
) -> None:
    """Raises ValueError unless every sequence lies in its table row, and every block that it reads in the cache."""
    num_blocks, _, block_size, _ = key_cache.shape
    capacity = block_tables.shape[1] * block_size
    lengths, num_queries = seq_lens.tolist(), query_starts.diff().tolist()
    rows = range(len(lengths)) if table_rows is None else table_rows.tolist()
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length > capacity:
            raise ValueError(f"seq_lens[{index}] is {length}; a row of block_tables holds {capacity} tokens")
        first = 0 if window is None else max(0, length - num_queries[index] - window + 1)
        used = block_tables[row, first // block_size : -(-length // block_size)]
        bad = used[(used < 0) | (used >= num_blocks)]
        if num_queries[index] and bad.numel():
            raise ValueError(
                f"block_tables[{row}] names block {int(bad[0])}; the cache has {num_blocks} blocks"
            )


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Raises ValueError unless every slot is -1 or lies in the cache."""
    if slot_mapping.numel() and (int(slot_mapping.min()) < -1 or int(slot_mapping.max()) >= num_slots):
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        raise ValueError(f"slot_mapping holds {low if low < -1 else high}: allowed are -1 to {num_slots - 1}")


def check_pairs(pairs: Tensor, num_blocks: int) -> None:
    """Raises ValueError unless the blocks exist, the targets are distinct and no target is a source."""
    sources, targets = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    for block in sources + targets:
        if not 0 <= block < num_blocks:
            raise ValueError(f"pairs names block {block}; the cache has {num_blocks} blocks")
    if len(set(targets)) != len(targets) or set(targets) & set(sources):
        raise ValueError("pairs must have distinct targets, and no target may be a source")


def check_transfers(pairs: Tensor, num_sources: int, num_targets: int) -> None:
    """Raises ValueError unless the blocks exist in their pools and the targets are distinct."""
    for name, blocks, num_blocks in (
        ("source", pairs[:, 0], num_sources),
        ("target", pairs[:, 1], num_targets),
    ):
        outside = blocks[(blocks < 0) | (blocks >= num_blocks)]
        if outside.numel():
            raise ValueError(
                f"pairs names {name} block {int(outside[0])}; that cache has {num_blocks} blocks"
            )
    if len(set(pairs[:, 1].tolist())) != len(pairs):
        raise ValueError("pairs must have distinct targets")
