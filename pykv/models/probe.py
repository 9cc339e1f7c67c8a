"""Probe runs: what a model computes by itself, and what it computes over a paged pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pykv.kv_format import KvFormat
from pykv.kv_pool import CACHE_DTYPES, KvPool
from pykv.layout import CacheType, KvLayout
from pykv.models.causal_model import CausalModel
from pykv.models.probe_step import ProbeStep

__all__ = ["PROBE_WINDOW", "eager_logits", "paged_logits"]

# During a probe all windows are this narrow, so that a few tokens reach past them.
PROBE_WINDOW = 5

BLOCK_SIZE = 4

# Two sequences of these lengths, and the tokens of each that a step computes: chunks, both at once, decodes.
SEQUENCE_LENGTHS = (13, 10)
STEPS = ((7, 0), (4, 8), (1, 1), (1, 1))

# Blocks in disorder, so that a table that is not followed is seen; block 0 stays the null block.
BLOCK_TABLES = ((5, 2, 7, 1), (6, 3, 4, 0))


@contextmanager
def narrow_windows(module: nn.Module, window: int = PROBE_WINDOW) -> Iterator[None]:
    """Makes all sliding windows of a model this narrow, in layers and configs, and puts them back."""
    owners = {id(owner): owner for owner in _window_owners(module)}
    saved = [(owner, owner.sliding_window) for owner in owners.values()]
    try:
        for owner, _ in saved:
            owner.sliding_window = window
        yield
    finally:
        for owner, value in saved:
            owner.sliding_window = value


def _window_owners(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        for owner in (part, getattr(part, "config", None)):
            if isinstance(getattr(owner, "sliding_window", None), int):
                yield owner


def narrowed(layout: KvLayout) -> KvLayout:
    """The layout as `narrow_windows` leaves it."""
    layers = tuple(
        layer if layer.window is None else replace(layer, window=PROBE_WINDOW) for layer in layout.layers
    )
    return replace(layout, layers=layers)


@torch.inference_mode()
def eager_logits(model: CausalModel) -> Tensor:
    """The logits [num_tokens, vocab_size] of the probe's sequences, each computed alone and in one piece.

    The model runs with the attention implementation that it has.
    """
    runs = (torch.tensor([tokens], device=model.device) for tokens in _sequences(model.vocab_size))
    with narrow_windows(model.module):
        return torch.cat([model.module(input_ids=run, use_cache=False).logits[0].float() for run in runs])


def paged_logits(model: CausalModel, backend: str, format: KvFormat | None = None) -> Tensor:
    """The same logits, computed in `STEPS` over a small paged pool that is full of NaN.

    Args:
        backend: that of the attention.
        format: of the pool; None: the model's own numbers.

    Raises:
        UnsupportedModelError: the attention layers do not run once each, or not as the layout says.
    """
    pool = _poisoned_pool(model, model.dtype if format is None else format)
    sequences = _sequences(model.vocab_size)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    with narrow_windows(model.module):
        for counts in STEPS:
            for row, logits in _run_step(model, pool, backend, sequences, done, counts):
                rows[row].append(logits)
            done = [before + count for before, count in zip(done, counts, strict=True)]
    return torch.cat([logits for parts in rows for logits in parts])


def _sequences(vocab_size: int) -> list[list[int]]:
    """Sequences of different tokens, the same at each call."""
    return [
        [(7919 * (index + 1) + 104729 * row) % vocab_size for index in range(length)]
        for row, length in enumerate(SEQUENCE_LENGTHS)
    ]


def _poisoned_pool(model: CausalModel, format: CacheType) -> KvPool:
    """A pool for `BLOCK_TABLES`, in which whatever is read before it was written spoils the logits.

    Of 8-bit numbers the scales do, where the pool has them. Rows that only a format can read are left as they are: all
    of a block is decoded.
    """
    num_blocks = 1 + max(max(table) for table in BLOCK_TABLES)
    pool = KvPool(narrowed(model.layout), num_blocks, BLOCK_SIZE, format, model.device)
    for part in (*pool.key_caches, *pool.value_caches, *pool.kv_scales):
        if isinstance(part, Tensor) and part.dtype in CACHE_DTYPES:
            part.fill_(torch.nan)
    return pool


def _run_step(
    model: CausalModel,
    pool: KvPool,
    backend: str,
    sequences: Sequence[Sequence[int]],
    done: Sequence[int],
    counts: Sequence[int],
) -> Iterator[tuple[int, Tensor]]:
    """Runs the next `counts` tokens of the sequences as one packed step; yields each row's logits."""
    rows = [row for row, count in enumerate(counts) if count]
    positions = [(row, place) for row in rows for place in range(done[row], done[row] + counts[row])]
    context = ProbeStep(
        pool,
        slot_mapping=_tensor([_slot(row, place) for row, place in positions], torch.int64, model),
        block_tables=_tensor(BLOCK_TABLES, torch.int32, model),
        seq_lens=_tensor([done[row] + counts[row] for row in rows], torch.int32, model),
        query_starts=_tensor([0, *_running_sum(counts[row] for row in rows)], torch.int32, model),
        table_rows=_tensor(rows, torch.int32, model),
        backend=backend,
    )
    tokens = _tensor([sequences[row][place] for row, place in positions], torch.int64, model)
    places = _tensor([place for _, place in positions], torch.int64, model)
    logits = model.forward(tokens, places, torch.arange(len(positions), device=model.device), context)
    context.check_calls()
    yield from zip(rows, torch.split(logits, [counts[row] for row in rows]), strict=True)


def _slot(row: int, place: int) -> int:
    return BLOCK_TABLES[row][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE


def _tensor(values: Any, dtype: torch.dtype, model: CausalModel) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=model.device)


def _running_sum(counts: Iterator[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total
