"""What the engine needs of a device: streams with events, pinned memory, recorded steps, and what memory is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Holds the calling thread until the stream has come to this place."""
        ...


class Stream(Protocol):
    """Does its work in order; nothing is in order between streams but what is waited for."""

    def run(self, work: Callable[[], None]) -> None:
        """Launches work; it may be done later."""
        ...

    def record(self) -> Event:
        """Marks the end of what was launched so far."""
        ...

    def wait(self, event: Event) -> None:
        """Work that is launched from now on is done after the event; the calling thread goes on."""
        ...


class Recording(Protocol):
    """Work that was recorded once, with its tensors where they were.

    Attributes:
        output: what the work returned; each replay fills it anew.
    """

    output: torch.Tensor

    def replay(self) -> None:
        """Launches the work again on the compute stream."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One reading of a device's memory, in bytes.

    Attributes:
        total: of the device.
        free: what no process holds.
        own: what this process holds.
    """

    total: int
    free: int
    own: int


class Device(Protocol):
    """Where a model computes.

    Attributes:
        torch_device: as torch knows it.
        compute: the stream on which the model runs.
    """

    torch_device: torch.device
    compute: Stream

    def active(self) -> AbstractContextManager[object]:
        """Where the calling thread launches by itself, it does so on this device."""
        ...

    def new_stream(self) -> Stream:
        """A further stream."""
        ...

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] zeros in host memory that the device's copies reach."""
        ...

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        """Runs work, which reads nothing back, once to set up what it needs, and records it."""
        ...

    def memory(self) -> DeviceMemory:
        """What there is now."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """How many bytes more than before the work held at its most, on the device."""
        ...
