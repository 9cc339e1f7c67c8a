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
from pykv.extras import needs_extra
from pykv.field_checks import shown

BACKEND_NAMES = ("torch", "cpu", "triton")
_ALLOWED = ", ".join(map(repr, ("auto", *BACKEND_NAMES)))


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


def backend_for(
    name: str, device: torch.device, dtype: torch.dtype, option: str = "backend"
) -> LoadedBackend:
    """Returns the backend called `name`; "auto" means the fastest one for the device and dtype.

    Args:
        option: what errors call the choice.

    Raises:
        TypeError: the name is no text, or the backend does not serve this dtype.
        ValueError: no backend has this name, or this machine cannot run it on this device.
        MissingExtraError: what the backend is built on is not installed.
    """
    if not isinstance(name, str):
        raise TypeError(f"{option} is {shown(name)}: allowed are {_ALLOWED}")
    return _load(name, device.type, dtype, option)


@functools.cache
def _load(given: str, device_type: str, dtype: torch.dtype, option: str) -> LoadedBackend:
    name = _best(device_type, dtype) if given == "auto" else given
    if name not in BACKEND_NAMES:
        raise ValueError(f"{option} is {shown(name)}: allowed are {_ALLOWED}")
    missing = _missing(name, device_type)
    if missing is not None:
        others = [other for other in BACKEND_NAMES if other != name and _missing(other, device_type) is None]
        allowed = ", ".join(map(repr, others)) or "none"
        raise ValueError(f"{option} is {given!r}, but {missing}: allowed for {device_type!r} is {allowed}")
    if name != "torch" and dtype is torch.float64:
        raise TypeError(f"{option} is {given!r}, which does not serve {dtype}; 'torch' does")
    module = importlib.import_module(f"pykv.attention.{name}_backend")
    return LoadedBackend(
        name,
        cast(Backend, module),
        checks_contents=name == "cpu",
        takes_tensor_scales=name != "triton",
        shares_prefixes=name != "torch",
    )


def _missing(name: str, device_type: str) -> str | None:
    """What a backend lacks to run on tensors of this device; None if it runs."""
    if device_type == "meta":
        return "tensors on 'meta' hold nothing"
    if name == "cpu" and device_type != "cpu":
        return "the CPU kernels read the host's memory"
    if name == "triton":
        with needs_extra("the triton backend", "torch"):
            from pykv.kernels.target import what_is_missing
        return what_is_missing(device_type)
    return None


def _best(device_type: str, dtype: torch.dtype) -> str:
    if dtype is torch.float64:
        return "torch"
    return {"cpu": "cpu", "cuda": "triton"}.get(device_type, "torch")
