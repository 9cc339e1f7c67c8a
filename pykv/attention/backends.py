"""Which backend serves a device, and what a backend must offer."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from pykv.attention.layer_cache import LayerCache

BACKEND_NAMES = ("torch", "cpu", "triton")


class Backend(Protocol):
    """The functions of a backend module; the front has checked every argument."""

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
        **extras: Any,
    ) -> Tensor:
        """Fills `out` (all of it: rows without keys and tokens of no row become zeros) and returns it.

        `sinks` are float32. `kv_scales` and `log_sum_exp` come only if the caller gave them.
        """

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **extras: Any,
    ) -> None:
        """Writes each token's K and V to its slot; slot -1 is skipped. `kv_scales` come only if given."""

    def copy_blocks(
        self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor
    ) -> None:
        """Copies whole blocks; `pairs` is int64 [num_pairs, 2] (source, target), no target is a source."""

    def transfer_blocks(
        self, sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor
    ) -> None:
        """Copies whole blocks from one pool to another that shares no memory with it."""


def backend_names() -> tuple[str, ...]:
    """Returns the names that `backend=` takes, besides "auto"."""
    return BACKEND_NAMES


@dataclass(frozen=True)
class LoadedBackend:
    """A backend: whether it checks itself what the index tensors hold, whether two numbers may be its scales, and
    whether its attention reads once what rows share, which `share_prefixes=False` turns off."""

    name: str
    functions: Backend
    checks_contents: bool
    takes_tensor_scales: bool
    shares_prefixes: bool

    def check_extras(self, extras: dict[str, Any]) -> None:
        """Raises ValueError if the backend serves no such argument."""
        if isinstance(extras.get("kv_scales"), tuple) and not self.takes_tensor_scales:
            raise ValueError(
                f"kv_scales is {extras['kv_scales']}: backend {self.name!r} serves a scale for each token and head; "
                "'torch' serves two numbers"
            )


def backend_for(name: str, device: torch.device, dtype: torch.dtype) -> LoadedBackend:
    """Returns the backend called `name`; "auto" means the fastest one for the device and dtype.

    Raises:
        ValueError: no backend has this name, or it does not serve this device or dtype.
    """
    return _load(name, device.type, dtype)


@functools.cache
def _load(name: str, device_type: str, dtype: torch.dtype) -> LoadedBackend:
    if name == "auto":
        name = _best(device_type, dtype)
    if name not in BACKEND_NAMES:
        raise ValueError(f"backend is {name!r}; allowed are 'auto', " + ", ".join(map(repr, BACKEND_NAMES)))
    if name == "cpu" and device_type != "cpu":
        raise ValueError(f"backend 'cpu' serves tensors on the CPU, but these are on {device_type!r}")
    if name != "torch" and dtype is torch.float64:
        raise TypeError(f"backend {name!r} does not serve {dtype}; 'torch' does")
    module = importlib.import_module(f"pykv.attention.{name}_backend")
    return LoadedBackend(
        name,
        cast(Backend, module),
        checks_contents=name == "cpu",
        takes_tensor_scales=name != "triton",
        shares_prefixes=name != "torch",
    )


def _best(device_type: str, dtype: torch.dtype) -> str:
    if dtype is torch.float64:
        return "torch"
    return {"cpu": "cpu", "cuda": "triton"}.get(device_type, "torch")
