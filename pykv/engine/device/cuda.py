"""A GPU as a device, through `torch.cuda`; never run where this was written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pykv.engine.device.interface import DeviceMemory, Event, Stream


class CudaStream:
    """One stream; None stands for the one that is current when it is used, on which the model runs."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    @property
    def _current(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._current):
            work()

    def record(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._current)
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, torch.cuda.Event):
            raise TypeError(f"a stream of {self._device} cannot wait for a {type(event).__name__}")
        self._current.wait_event(event)


class CudaRecording:
    """A CUDA graph; all graphs of a device are captured on one stream and take turns in one pool of memory.

    torch's own capture stream belongs to the device that was captured on first.
    """

    def __init__(self, work: Callable[[], torch.Tensor], stream: torch.cuda.Stream, pool: object) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            stream
        ):  # and back, also where a capture fails, which leaves its stream current
            work()  # kernels are compiled and libraries set up for this stream outside the capture
            torch.cuda.synchronize()
            with torch.cuda.graph(
                self._graph,
                pool=pool,  # type: ignore[arg-type]
                stream=stream,
                capture_error_mode="thread_local",  # what other threads do is no part of it
            ):
                self.output = work()

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """See `Device`."""

    def __init__(self, torch_device: torch.device) -> None:
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self.torch_device = torch.device("cuda", index)
        self.compute: Stream = CudaStream(self.torch_device, None)
        self._graph_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._graph_pool = torch.cuda.graph_pool_handle()

    def active(self) -> torch.cuda.device:
        """Graphs and Triton's launches go by the current device, which each thread has for itself."""
        return torch.cuda.device(self.torch_device)

    def new_stream(self) -> CudaStream:
        return CudaStream(self.torch_device, torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self, work: Callable[[], torch.Tensor]) -> CudaRecording:
        with self.active():
            return CudaRecording(work, self._graph_stream, self._graph_pool)

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(self.torch_device))

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        with self.active():
            work()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - before
