"""The CPU as a device: whatever is launched is done at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from pykv.engine.device.interface import DeviceMemory, Event, Stream
from pykv.errors import StepError
from pykv.host_memory import available_bytes


class DoneEvent:
    """Has happened."""

    def synchronize(self) -> None:
        return


class ImmediateStream:
    """Does its work while it is launched."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return DoneEvent()

    def wait(self, event: Event) -> None:
        event.synchronize()


class RepeatedWork:
    """Runs the work again and copies what it returns to where the first run left it."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.output = work()

    def replay(self) -> None:
        self.output.copy_(self._work())


class HostDevice:
    """See `Device`. It lets a CPU go through everything that a GPU's engine does, except that nothing is late."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute: Stream = ImmediateStream()

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_stream(self) -> ImmediateStream:
        return ImmediateStream()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def record(self, work: Callable[[], torch.Tensor]) -> RepeatedWork:
        return RepeatedWork(work)

    def memory(self) -> DeviceMemory:
        free = available_bytes()
        if free is None:
            raise StepError("the system does not say how much memory it has left")
        return DeviceMemory(total=free, free=free, own=0)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0
