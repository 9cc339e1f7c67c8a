"""How large the KV pool of a device may be."""

from __future__ import annotations

import torch

from pykv.engine.device.interface import Device, DeviceMemory
from pykv.kv_pool import KvPool
from pykv.models.causal_model import CausalModel
from pykv.models.step_context import StepContext
from pykv.planner.memory import GpuMemory, kv_budget

# Of the logits: where recorded decodes leave them, what penalties count, those kept for log-probabilities, and what a
# draw holds at its most. A sort of all tokens, which top-p takes for flat rows alone, has what the utilization leaves.
_LOGITS_COPIES = 8
_HELD_BY_GRAPHS = 2  # a step's peak, and as much again for what recorded decodes keep


def kv_bytes(memory: DeviceMemory, reserve_bytes: int, utilization: float) -> int:
    """The bytes for the KV pool: of the process' share of the device, and no more than is free.

    What other processes hold is not taken from this one's share.

    Args:
        memory: read once, when the weights are loaded.
        reserve_bytes: for what a step needs.
        utilization: the share of the device's memory that this process may take.

    Raises:
        ConfigError: nothing is left.
    """
    others = max(0, memory.total - memory.free - memory.own)
    budget = kv_budget(
        [GpuMemory(memory.total, others)],
        weights_bytes=memory.own,
        reserve_bytes=reserve_bytes,
        utilization=utilization,
    )
    return budget.kv


def step_bytes(
    device: Device, model: CausalModel, attention_backend: str, *, num_tokens: int, num_samples: int
) -> int:
    """What the largest step needs beside weights and KV pool, measured by running one that writes nowhere.

    Args:
        num_tokens: the most that a step computes.
        num_samples: the most rows of logits.
    """
    block_size = 16
    pool = KvPool(model.layout, 2, block_size, model.dtype, model.device)
    count = min(num_tokens, model.max_model_len)
    columns = -(-count // block_size)

    def tensor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(device=model.device, dtype=dtype)

    def run() -> None:
        context = StepContext(
            pool,
            slot_mapping=tensor(torch.full((num_tokens,), -1), torch.int64),
            block_tables=tensor(torch.ones(1, columns), torch.int32),
            seq_lens=tensor(torch.tensor([count]), torch.int32),
            query_starts=tensor(torch.tensor([0, count]), torch.int32),
            backend=attention_backend,
        )
        tokens = tensor(torch.zeros(num_tokens), torch.int64)
        positions = tensor(torch.arange(num_tokens) % count, torch.int64)
        model.forward(tokens, positions, tensor(torch.arange(num_samples) % num_tokens, torch.int64), context)

    logits_bytes = 4 * num_samples * model.vocab_size
    return _HELD_BY_GRAPHS * device.peak_bytes(run) + _LOGITS_COPIES * logits_bytes
