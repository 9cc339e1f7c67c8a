"""Turns a model's source and the engine's options into a runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pykv.engine.config import DEFAULT_KV_MEMORY_BYTES, EngineConfig
from pykv.engine.runner import ModelRunner
from pykv.errors import ConfigError
from pykv.kv_pool import KvPool
from pykv.models import CausalModel, load_model


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
    pool = KvPool(loaded.layout, _num_blocks(loaded, config), config.block_size, loaded.dtype, loaded.device)
    return ModelRunner(loaded, pool, config.attention_backend), tokenizer or own_tokenizer


def _num_blocks(model: CausalModel, config: EngineConfig) -> int:
    """Returns how many blocks the pool gets."""
    if config.num_blocks is not None:
        return config.num_blocks
    memory = config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES
    block_bytes = model.layout.block_bytes(config.block_size, model.dtype)
    if memory < 2 * block_bytes:
        raise ConfigError(f"kv_memory_bytes is {memory}; allowed: at least {2 * block_bytes}, two blocks")
    return memory // block_bytes
