"""Turns a model's source and the engine's options into a runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pykv.engine.cache_format import chosen_format
from pykv.engine.config import DEFAULT_KV_MEMORY_BYTES, EngineConfig
from pykv.engine.runner import ModelRunner
from pykv.errors import ConfigError
from pykv.kv_pool import KvPool
from pykv.layer_groups import LayerGroups
from pykv.models import load_model


def load_runner(
    model: str | Path | nn.Module,
    tokenizer: Any,
    config: EngineConfig,
    progress: Callable[[str], None] | None,
) -> tuple[ModelRunner, Any]:
    """Loads the model and allocates its KV pool; returns the runner and the model's tokenizer.

    Raises:
        ConfigError: the pool does not fit the machine, or is too small for one block.
        ModelError, UnsupportedModelError: the model cannot be read or served.
    """
    source = (model, tokenizer) if isinstance(model, nn.Module) else model
    loaded, own_tokenizer = load_model(
        source,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        progress=progress,
    )
    form = chosen_format(loaded, config)
    groups = LayerGroups.of(loaded.layout)
    block_bytes = groups.block_bytes(loaded.layout, config.block_size, form)
    num_blocks = _num_blocks(config, block_bytes)
    pool = KvPool(loaded.layout, num_blocks, config.block_size, form, loaded.device, groups=groups)
    swap = _swap_pool(pool, config.swap_space_bytes, block_bytes)
    return ModelRunner(loaded, pool, config.attention_backend, swap), tokenizer or own_tokenizer


def _num_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Returns how many blocks the pool gets."""
    if config.num_blocks is not None:
        return config.num_blocks
    memory = config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES
    if memory < 2 * block_bytes:
        raise ConfigError(f"kv_memory_bytes is {memory}; allowed: at least {2 * block_bytes}, two blocks")
    return memory // block_bytes


def _swap_pool(pool: KvPool, swap_space_bytes: int, block_bytes: int) -> KvPool | None:
    """Returns the host's pool for the blocks of preempted sequences, its null block included."""
    if not swap_space_bytes:
        return None
    if swap_space_bytes < 2 * block_bytes:
        raise ConfigError(
            f"swap_space_bytes is {swap_space_bytes}; allowed: 0, or at least {2 * block_bytes}, two blocks"
        )
    num_blocks = swap_space_bytes // block_bytes
    is_pinned = pool.device.type == "cuda"
    return KvPool(
        pool.layout, num_blocks, pool.block_size, pool.format, groups=pool.groups, is_pinned=is_pinned
    )
