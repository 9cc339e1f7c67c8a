"""The arrays of a step, in host memory that the device copies from, and where they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pykv.engine.device.interface import Device, Event
from pykv.scheduler import Plan, SchedulerConfig, StepBuffers

ALIGNMENT = 64
TABLES = "block_tables"
COUNTED = ("swap_out_pairs", "swap_in_pairs", "copy_pairs")
"""Of these the part is copied that a plan fills, which is nothing in most steps; of the tables the rows in use.

All else is small and is copied as one.
"""
HOST_ALONE = frozenset(
    {"sample_rows", "sample_positions", "placed_requests", "placed_children", "placed_rows", "finish_reasons"}
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each array lies in a block of bytes.

    Attributes:
        places: name to (offset, dtype, shape).
        common_bytes: of the arrays that are copied as one, which come first.
        num_bytes: of everything.
    """

    places: Mapping[str, tuple[int, torch.dtype, tuple[int, ...]]]
    common_bytes: int
    num_bytes: int

    @classmethod
    def of(cls, buffers: StepBuffers) -> Layout:
        """The layout of what a device reads of such buffers."""
        arrays = {
            name: array
            for name, array in vars(buffers).items()
            if isinstance(array, np.ndarray) and name not in HOST_ALONE
        }
        later = (*COUNTED, TABLES)
        places, offset, common = {}, 0, 0
        for name in (*sorted(arrays.keys() - set(later)), *later):
            if name == later[0]:
                common = offset
            places[name] = (offset, torch.from_numpy(arrays[name]).dtype, arrays[name].shape)
            offset += -(-arrays[name].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(places, common, offset)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in uint8 [num_bytes]."""
        return {
            name: memory[offset : offset + dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)
            for name, (offset, dtype, shape) in self.places.items()
        }


class DeviceArrays:
    """The arrays as the device has them: one set, which each step overwrites in the model's stream.

    Attributes:
        views: the arrays by name.
    """

    def __init__(self, device: Device, config: SchedulerConfig) -> None:
        self.layout = Layout.of(StepBuffers(config))
        self.device = device
        self._memory = torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.views = self.layout.views(self._memory)

    def upload(self, host: torch.Tensor, counts: Mapping[str, int]) -> Event:
        """Launches the copies of one step's arrays; returns the place in the stream where the host's memory was read.

        Args:
            host: uint8 [num_bytes] with the same layout.
            counts: how much of the tables and of the lists of copies the step fills.
        """
        common, sources = self.layout.common_bytes, self.layout.views(host)

        def copy() -> None:
            self._memory[:common].copy_(host[:common], non_blocking=True)
            for name, count in counts.items():
                for target, source in zip(_parts(self.views[name]), _parts(sources[name]), strict=True):
                    if count:
                        target[:count].copy_(source[:count], non_blocking=True)

        self.device.compute.run(copy)
        return self.device.compute.record()


class HostArrays:
    """One set of buffers for the scheduler, in memory that the device copies from later.

    Attributes:
        buffers: what `Scheduler.plan` fills.
    """

    def __init__(self, arrays: DeviceArrays, config: SchedulerConfig) -> None:
        self._arrays = arrays
        self._memory = arrays.device.host_bytes(arrays.layout.num_bytes)
        self.buffers = StepBuffers(config, arrays=arrays.layout.views(self._memory))
        self._read: Event | None = None

    def wait(self) -> None:
        """Holds the calling thread until the copies from this memory are done: it may be filled again then."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None

    def upload(self, plan: Plan) -> None:
        """Launches the copies of the step that the buffers hold."""
        rows = self.buffers.table_rows[: plan.num_batch_rows]
        pairs = (plan.num_swap_outs, plan.num_swap_ins, plan.num_copies)
        counts = {TABLES: int(rows.max(initial=-1)) + 1, **dict(zip(COUNTED, pairs, strict=True))}
        self._read = self._arrays.upload(self._memory, counts)


def _parts(array: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tables of each layer group; anything else as it is. Each part's beginning is contiguous."""
    return array.unbind() if array.dim() == 3 else (array,)
