"""Loads what the options name: the model, its cache and its engine. The heavy imports wait until then."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pykv
from pykv.extras import needs_extra
from pykv.models.names import check_name
from pykv.service.options import ServeOptions
from pykv.service.served import ModelDescription, ServedModel
from pykv.service.tokenizer_archive import tokenizer_archive

if TYPE_CHECKING:
    from pykv.engine import Engine
    from pykv.engine.runner import ModelRunner

__all__ = ["load_model"]


def load_model(options: ServeOptions, tell: Callable[[str], None]) -> ServedModel:
    """Loads a model; takes seconds to minutes.

    Args:
        tell: told in words what the loading does.

    Raises:
        MissingExtraError: what models are read with is not installed.
        ConfigError: the options do not fit together, or not the machine's memory.
        ModelError, UnsupportedModelError: the model cannot be found, read or served.
    """
    config = options.engine_config()
    check_name(options.model)
    tell("importing torch and transformers")
    with needs_extra("pykv-serve", "serve"):
        from pykv.engine import AsyncEngine, Engine
        from pykv.engine.loading import load_runner

    runner, tokenizer = load_runner(options.model, None, config, tell)
    engine = Engine.from_runner(runner, tokenizer, config)
    served = AsyncEngine(engine, max_pending_tokens=options.max_pending_tokens)
    archive = partial(tokenizer_archive, tokenizer, runner.config) if tokenizer is not None else None
    return ServedModel(served, describe(engine, runner), archive)


def describe(engine: "Engine", runner: "ModelRunner") -> ModelDescription:
    """What clients and operators are told of an engine."""
    pool = runner.pool
    return ModelDescription(
        name=runner.name,
        version=pykv.__version__,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(pool.device),
        vocab_size=runner.vocab_size,
        eos_token_ids=tuple(sorted(runner.eos_token_ids)),
        max_model_len=engine.max_model_len,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks - 1,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        kv_dtype=pool.format.name,
        model_type=str(getattr(runner.config, "model_type", "")),
        architectures=tuple(getattr(runner.config, "architectures", None) or ()),
        windows=runner.windows,
    )
