"""Turns a model's source and the engine's options into a runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pykv.engine.cache_format import chosen_format
from pykv.engine.config import DEFAULT_KV_MEMORY_BYTES, EngineConfig
from pykv.engine.device.device_runner import DeviceRunner
from pykv.engine.device.interface import Device
from pykv.engine.device.pool_size import kv_bytes, step_bytes
from pykv.engine.runner import ModelRunner
from pykv.errors import ConfigError
from pykv.field_checks import as_callable, optional, refuse
from pykv.kv_pool import KvPool
from pykv.layer_groups import LayerGroups
from pykv.models import CausalModel, load_model
from pykv.models.gate import check_format
from pykv.models.timed_step import say_nothing
from pykv.torch_device import free_bytes


def load_runner(
    model: str | Path | nn.Module,
    tokenizer: Any,
    config: EngineConfig,
    progress: Callable[[str], None] | None,
) -> tuple[ModelRunner, Any]:
    """Loads the model and allocates its KV pool; returns the runner and the model's tokenizer.

    Raises:
        ConfigError: an argument is not of its type, the machine has no such device or cannot run the attention
            backend, or the pool does not fit it, or is too small for one block.
        ModelError, UnsupportedModelError: the model cannot be read or served.
    """
    if not isinstance(model, (str, Path, nn.Module)) or model == "":
        refuse("model", model, "a name, a path, or a module of transformers", ConfigError)
    optional(as_callable, "progress", progress, ConfigError)
    _check_host_memory(config)
    source = (model, tokenizer) if isinstance(model, nn.Module) else model
    loaded, own_tokenizer = load_model(
        source,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend,
        progress=progress,
    )
    form = chosen_format(loaded, config)
    check_format(loaded, form, config.attention_backend, progress or say_nothing)
    groups = LayerGroups.of(loaded.layout)
    block_bytes = groups.block_bytes(loaded.layout, config.block_size, form)
    device = device_of(loaded.device)
    num_blocks = _num_blocks(config, block_bytes, loaded, device)
    pool = KvPool(loaded.layout, num_blocks, config.block_size, form, loaded.device, groups=groups)
    swap = _swap_pool(pool, config.swap_space_bytes, block_bytes)
    return _runner(loaded, pool, swap, config, device), tokenizer or own_tokenizer


def device_of(torch_device: torch.device) -> Device | None:
    """The device whose work is launched and done later; None for a CPU."""
    if torch_device.type != "cuda":
        return None
    from pykv.engine.device.cuda import CudaDevice

    return CudaDevice(torch_device)


def _runner(
    model: CausalModel, pool: KvPool, swap: KvPool | None, config: EngineConfig, device: Device | None
) -> ModelRunner:
    if device is None:
        return ModelRunner(model, pool, config.attention_backend, swap)
    return DeviceRunner(
        model, pool, config.attention_backend, swap, device=device, uses_graphs=config.cuda_graphs
    )


def _check_host_memory(config: EngineConfig) -> None:
    """Refuses before the model is loaded what no host memory can hold."""
    host = torch.device("cpu")
    _check_bytes("swap_space_bytes", config.swap_space_bytes, host)
    if config.kv_memory_bytes is not None and config.device == "cpu":
        _check_bytes("kv_memory_bytes", config.kv_memory_bytes, host)


def _check_bytes(field: str, num_bytes: int, device: torch.device) -> None:
    available = free_bytes(device)
    if available is not None and num_bytes > available:
        allowed = f"at most {available}, the bytes of {device.type} memory that are available"
        refuse(field, num_bytes, allowed, ConfigError)


def _num_blocks(config: EngineConfig, block_bytes: int, model: CausalModel, device: Device | None) -> int:
    """Returns how many blocks the pool gets."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory_bytes is None and device is not None:
        return _blocks_that_fit(config, block_bytes, model, device)
    memory = config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES
    if memory < 2 * block_bytes:
        refuse("kv_memory_bytes", memory, f"at least {2 * block_bytes}, two blocks", ConfigError)
    _check_bytes("kv_memory_bytes", memory, model.device)
    return memory // block_bytes


def _blocks_that_fit(config: EngineConfig, block_bytes: int, model: CausalModel, device: Device) -> int:
    """As many as the device has room for once the weights and a step have theirs."""
    reserve = step_bytes(
        device,
        model,
        config.attention_backend,
        num_tokens=config.max_num_batched_tokens,
        num_samples=config.max_num_seqs,
    )
    memory = kv_bytes(device.memory(), reserve, config.gpu_memory_utilization)
    if memory < 2 * block_bytes:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}, which leaves {memory} bytes for the KV pool: "
            f"allowed is what leaves at least {2 * block_bytes}, two blocks"
        )
    return memory // block_bytes


def _swap_pool(pool: KvPool, swap_space_bytes: int, block_bytes: int) -> KvPool | None:
    """Returns the host's pool for the blocks of preempted sequences, its null block included."""
    if not swap_space_bytes:
        return None
    if swap_space_bytes < 2 * block_bytes:
        refuse(
            "swap_space_bytes", swap_space_bytes, f"0, or at least {2 * block_bytes}, two blocks", ConfigError
        )
    _check_bytes("swap_space_bytes", swap_space_bytes, torch.device("cpu"))
    num_blocks = swap_space_bytes // block_bytes
    is_pinned = pool.device.type == "cuda"
    return KvPool(
        pool.layout, num_blocks, pool.block_size, pool.format, groups=pool.groups, is_pinned=is_pinned
    )
