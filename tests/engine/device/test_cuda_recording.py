"""How a recording is made, on a torch.cuda that notes on which stream the work is launched, and captures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pykv.engine.device.cuda import CudaRecording


class FakeStream:
    def __init__(self) -> None:
        self.waits: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other)


class FakeCuda:
    """The parts of torch.cuda that a recording uses, with their state: the current stream."""

    def __init__(self) -> None:
        self.default = self.current = FakeStream()
        self.log: list[str] = []

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: object, *, pool: object, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch's: where the end of the capture raises, the stream stays as it is."""
        self.current = stream
        self.log.append(f"capture, {pool}, {capture_error_mode}")
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed:
                raise RuntimeError("operation failed due to a previous error during capture")
        self.current = self.default


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append("synchronize"))
    return fake


def noted(cuda: FakeCuda, stream: FakeStream) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        cuda.log.append("work" if cuda.current is stream else "work on another stream")
        return torch.zeros(1)

    return work


def test_work_is_done_once_on_the_captures_stream_and_then_captured(cuda: FakeCuda) -> None:
    stream = FakeStream()
    CudaRecording(noted(cuda, stream), stream, "the pool")  # type: ignore[arg-type]
    assert cuda.log == ["work", "synchronize", "capture, the pool, thread_local", "work"]
    assert stream.waits == [cuda.default]
    assert cuda.current is cuda.default


def test_a_capture_that_fails_leaves_the_stream_that_was_current(cuda: FakeCuda) -> None:
    stream = FakeStream()
    work = noted(cuda, stream)

    def refused() -> torch.Tensor:
        if cuda.log[-1:] and cuda.log[-1].startswith("capture"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return work()

    with pytest.raises(RuntimeError, match="capture"):
        CudaRecording(refused, stream, "the pool")  # type: ignore[arg-type]
    assert cuda.current is cuda.default
