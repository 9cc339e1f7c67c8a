"""What a GPU is asked, and which one: a driver and a torch that only note it stand for the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pykv.kernels import target

current: list[int] = []


@contextmanager
def made_current(device: torch.device | int) -> Iterator[None]:
    current.append(device if isinstance(device, int) else device.index)
    yield
    current.pop()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An sm_90 and an sm_103, which no table lists; the driver answers for the current one."""

    def reported() -> GPUTarget:
        return GPUTarget("cuda", 103 if current and current[-1] == 1 else 90, 32)

    shared = {0: 232_448, 1: 233_472}
    utilities = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": shared[index]})
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=reported, utils=utilities))
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    processors = SimpleNamespace(multi_processor_count=160)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    target._of_gpu.cache_clear()
    yield
    target._of_gpu.cache_clear()


def test_each_gpu_is_asked_for_itself(two_gpus: None) -> None:
    first, second = (target.current_target(torch.device("cuda", index)) for index in (0, 1))
    assert (first.name, first.shared_bytes) == ("sm_90", 232_448)
    assert second == target.Target("sm_103", num_processors=160, shared_bytes=233_472, native_e4m3=True)
    assert second.family == "sm"


def test_a_gpu_without_a_number_is_the_current_one(two_gpus: None) -> None:
    assert target.current_target(torch.device("cuda")) == target.current_target(torch.device("cuda", 1))


def test_a_launch_is_on_the_device_of_its_tensors(two_gpus: None) -> None:
    with target.on_device_of(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))):  # type: ignore[arg-type]
        assert current[-1] == 1
    with target.on_device_of(torch.zeros(1, device="cpu")):
        assert not current
