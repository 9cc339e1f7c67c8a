"""What a device has for the KV pool: other processes' memory is not this one's, and what is not free is not there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pykv.engine import loading
from pykv.engine.config import EngineConfig
from pykv.engine.device.host import HostDevice
from pykv.engine.device.interface import DeviceMemory
from pykv.engine.device.pool_size import kv_bytes, step_bytes
from pykv.errors import ConfigError

GB = 10**9


def memory(total: int, others: int, own: int) -> DeviceMemory:
    return DeviceMemory(total * GB, (total - others - own) * GB, own * GB)


@pytest.mark.parametrize(
    ("reading", "reserve", "utilization", "left"),
    [
        (memory(80, 30, 10), 0, 0.5, 30),  # 40 - 10: what others hold is not taken from it
        (memory(80, 30, 10), 0, 0.7, 40),  # 56 - 10 are not free any more
        (memory(80, 0, 10), 5, 0.5, 25),
        (memory(80, 30, 10), 12, 0.9, 28),
        (DeviceMemory(80 * GB, 75 * GB, 10 * GB), 0, 0.5, 30),  # others gave back between two reads
    ],
)
def test_the_pool_gets_what_is_left_of_the_share_and_free(
    reading: DeviceMemory, reserve: int, utilization: float, left: int
) -> None:
    assert kv_bytes(reading, reserve * GB, utilization) == left * GB


def test_nothing_left_is_an_error_and_never_a_size() -> None:
    with pytest.raises(ConfigError, match="nothing is left for the KV cache"):
        kv_bytes(memory(80, 75, 4), 2 * GB, 0.9)


class FullDevice(HostDevice):
    """Has 64 MB more than a step needs, and says what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=200 * 2**20, free=164 * 2**20, own=16 * 2**20)

    def peak_bytes(self, work: object) -> int:
        self.measured += 1
        work()  # type: ignore[operator]
        return 3 * 2**20


def test_an_engine_without_a_size_takes_what_the_device_has(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: torch.nn.Module
) -> None:
    device = FullDevice()
    monkeypatch.setattr(loading, "device_of", lambda _: device)
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, gpu_memory_utilization=0.5, cuda_graphs=False
    )
    runner, _ = loading.load_runner(tiny_llama, None, config, None)
    block_bytes = runner.pool.nbytes // runner.num_blocks
    reserve = 2 * 3 * 2**20 + 8 * 4 * 4 * runner.vocab_size
    assert device.measured == 1
    assert runner.num_blocks == (100 * 2**20 - 16 * 2**20 - reserve) // block_bytes
    given = dataclasses.replace(config, num_blocks=7)
    assert loading.load_runner(tiny_llama, None, given, None)[0].num_blocks == 7
    assert device.measured == 1


def test_the_measured_step_is_the_largest_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny_model: object
) -> None:
    seen = []
    original = type(tiny_model).forward

    def forward(
        self: object, tokens: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor, context: object
    ):
        seen.append((len(tokens), len(indices), context.slot_mapping.unique().tolist()))
        return original(self, tokens, positions, indices, context)

    monkeypatch.setattr(type(tiny_model), "forward", forward)
    step_bytes(HostDevice(), tiny_model, "torch", num_tokens=300, num_samples=5)
    assert seen == [(300, 5, [-1])]


def test_a_share_that_none_can_have_is_refused() -> None:
    for share in (0.0, 1.5, float("nan"), True, "all"):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            EngineConfig(gpu_memory_utilization=share)  # type: ignore[arg-type]
