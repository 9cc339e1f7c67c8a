"""What a GPU has for the KV cache once weights, reserve and other processes have theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykv.errors import ConfigError
from pykv.planner.checks import checked_share, refused
from pykv.planner.sizes import show_bytes

__all__ = ["GpuMemory", "KvBudget", "kv_budget"]


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One reading of a GPU's memory, before the weights are loaded.

    Attributes:
        total_bytes: of the GPU.
        in_use_bytes: held by other processes; they are not this engine's, and not taken from its share.
    """

    total_bytes: int
    in_use_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return self.total_bytes - self.in_use_bytes


@dataclass(frozen=True, slots=True)
class KvBudget:
    """How the memory of the rank with the least room is parted, in bytes.

    Attributes:
        total, in_use: as read.
        usable: what the engine may take: its share of the total, and no more than is free.
        weights, reserve: of one rank.
        kv: what is left.
    """

    total: int
    in_use: int
    usable: int
    weights: int
    reserve: int
    kv: int


def kv_budget(
    gpus: Sequence[GpuMemory], *, weights_bytes: int, reserve_bytes: int = 0, utilization: float = 0.9
) -> KvBudget:
    """Parts the memory of an engine's GPUs; every rank's pool is as large as the smallest.

    Args:
        gpus: one reading of each rank's GPU.
        weights_bytes, reserve_bytes: of each rank.
        utilization: the share of a GPU's total memory that the engine may take.

    Raises:
        ConfigError: there is no GPU, others hold more than one has, or nothing is left for the cache.
    """
    checked_share("utilization", utilization, open_below=True)
    if not gpus:
        raise refused("gpus", list(gpus), "at least one")
    for gpu in gpus:
        if not 0 <= gpu.in_use_bytes <= gpu.total_bytes:
            raise refused(
                "in_use", gpu.in_use_bytes, f"a size from 0 to the GPU's {show_bytes(gpu.total_bytes)}"
            )
    gpu = min(gpus, key=lambda gpu: _usable(gpu, utilization))
    usable = _usable(gpu, utilization)
    kv = usable - weights_bytes - reserve_bytes
    if kv <= 0:
        raise ConfigError(
            f"nothing is left for the KV cache: {show_bytes(weights_bytes)} of weights and {show_bytes(reserve_bytes)} "
            f"of reserve on each GPU, which has {show_bytes(usable)} for them ({utilization:g} of "
            f"{show_bytes(gpu.total_bytes)}, {show_bytes(gpu.in_use_bytes)} of it in use by others): allowed is "
            f"{_more_ranks(weights_bytes, usable - reserve_bytes)}larger GPUs, or smaller weights"
        )
    return KvBudget(gpu.total_bytes, gpu.in_use_bytes, usable, weights_bytes, reserve_bytes, kv)


def _more_ranks(weights_bytes: int, room: int) -> str:
    """How many times as many ranks leave something, in words; nothing where no number of them does."""
    if room <= 0:
        return ""
    return f"at least {weights_bytes // room + 1} times as many GPUs in tensor_parallel, "


def _usable(gpu: GpuMemory, utilization: float) -> int:
    return min(int(gpu.total_bytes * utilization), gpu.free_bytes)
