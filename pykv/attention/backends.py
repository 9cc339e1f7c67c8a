"""Which backend serves a device, and what a backend must offer."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

BACKEND_NAMES = ("torch", "cpu", "triton")


class Backend(Protocol):
    """The three functions of a backend module; the front has checked every argument."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        table_rows: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """Fills `out` (all of it: rows without keys and tokens of no row become zeros) and returns it.

        `sinks` are float32.
        """

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes each token's K and V to its slot; slot -1 is skipped."""

    def copy_blocks(
        self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor
    ) -> None:
        """Copies whole blocks; `pairs` is int64 [num_pairs, 2] (source, target), no target is a source."""


def backend_names() -> tuple[str, ...]:
    """Returns the names that `backend=` takes, besides "auto"."""
    return BACKEND_NAMES


def backend_for(name: str, device: torch.device) -> Backend:
    """Returns the backend called `name`; "auto" means the fastest one for the device.

    Raises:
        ValueError: no backend has this name, or it does not serve this device.
    """
    return _load(name, device.type)


@functools.cache
def _load(name: str, device_type: str) -> Backend:
    if name == "auto":
        name = {"cpu": "torch", "cuda": "triton"}.get(device_type, "torch")
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; allowed are 'auto', " + ", ".join(map(repr, BACKEND_NAMES)))
    if name == "cpu" and device_type != "cpu":
        raise ValueError(f"backend 'cpu' serves tensors on the CPU, but these are on {device_type!r}")
    return cast(Backend, importlib.import_module(f"pykv.attention.{name}_backend"))
