"""What a device's data sheet says that a step costs.

A roofline takes the larger of two times, and adds a fixed one:

    compute = (token_flops × tokens + pair_flops × pairs that attend) / (flops × efficiency)
    memory  = (weights + experts that are used + keys and values of the contexts) / (bandwidth × efficiency)
    step    = fixed + swapped blocks + max(compute, memory)

Of layers with a window neither pairs nor reads reach beyond it. Tokens are sent to experts independently, any as likely
as another: of n experts of which a token uses k, a step of t tokens reads the share 1 - (1 - k/n)^t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykv.errors import ConfigError
from pykv.kv_format import USUAL_HEAD_DIM, KvFormat
from pykv.planner.tables import Gpu
from pykv.simulator.served_model import ServedModel

__all__ = ["EFFICIENCY", "HOST_BANDWIDTH", "STEP_SECONDS", "Device"]

EFFICIENCY = 0.7
"""The share of a data sheet's compute and bandwidth that a well-made engine reaches."""
STEP_SECONDS = 5e-4
"""Of a roofline's step that neither compute nor memory explain: launches, sampling, the scheduler."""
HOST_BANDWIDTH = 25e9
"""Bytes a second of a copy to or from the host, as PCIe 4.0 of 16 lanes gives in practice."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a device reaches.

    Attributes:
        flops: operations a second.
        bandwidth: bytes a second of its own memory.
        host_bandwidth: bytes a second of a copy to or from the host.
        fixed: seconds of every step.
    """

    flops: float
    bandwidth: float
    host_bandwidth: float
    fixed: float

    @classmethod
    def of(cls, gpu: Gpu, values: Mapping[str, float]) -> Device:
        """A device of the data sheet, where no other values are given by these names, or an `efficiency`.

        Raises:
            ConfigError: nobody says its flops, or its efficiency is above 1.
        """
        flops = values.get("flops", gpu.flops_per_second)
        if flops is None:
            raise ConfigError(f"flops of {gpu.name} are not known: give flops=")
        efficiency = values.get("efficiency", EFFICIENCY)
        if efficiency > 1:
            raise ConfigError(f"efficiency is {efficiency:g}: allowed is above 0 and at most 1")
        return cls(
            flops=flops * efficiency,
            bandwidth=values.get("bandwidth", gpu.bandwidth_bytes_per_second) * efficiency,
            host_bandwidth=values.get("host_bandwidth", HOST_BANDWIDTH),
            fixed=values.get("fixed", STEP_SECONDS),
        )

    def serving(self, served: ServedModel, kv_format: KvFormat, block_size: int) -> dict[str, Any]:
        """The parts of a step's cost, by their names in `CostModel`, for a known model."""
        return {
            "fixed": self.fixed,
            "per_token": served.token_flops / self.flops,
            "per_pair": served.pair_flops(windowed=False) / self.flops,
            "weights": served.common_bytes / self.bandwidth,
            "experts": served.expert_bytes / self.bandwidth,
            "expert_share": served.expert_share,
            "per_context_token": served.read_bytes(kv_format, windowed=False) / self.bandwidth,
            "window": served.window,
            "per_window_pair": served.pair_flops(windowed=True) / self.flops,
            "per_window_token": served.read_bytes(kv_format, windowed=True) / self.bandwidth,
            "per_swapped_block": served.block_bytes(block_size, kv_format) / self.host_bandwidth,
            "overlaps": True,
        }

    def serving_by_hand(
        self, values: Mapping[str, float], kv_format: KvFormat, block_size: int
    ) -> dict[str, Any]:
        """The same for a model of which `parameters` and `kv_bytes` are given, perhaps more."""
        read = values["kv_bytes"] * kv_format.row_bytes(USUAL_HEAD_DIM) / (2 * USUAL_HEAD_DIM)
        parameters = values["parameters"]
        return {
            "fixed": self.fixed,
            "per_token": 2 * parameters / self.flops,
            "per_pair": values.get("pair_flops", 0.0) / self.flops,
            "weights": parameters * values.get("bytes_per_parameter", 2.0) / self.bandwidth,
            "per_context_token": read / self.bandwidth,
            "per_swapped_block": block_size * read / self.host_bandwidth,
            "overlaps": True,
        }
