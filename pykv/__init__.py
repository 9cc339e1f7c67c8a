"""pykv: a paged KV cache for LLM inference, with prefix sharing and a continuous-batching scheduler in Rust.

Three ways in:

- `pykv.Scheduler` for engines of your own: submit, plan, (your model runs), apply. It needs numpy alone.
- `pykv.Engine` for a causal language model of transformers (extra `models`).
- `pykv-serve` and `pykv.Client` for tokens streamed over gRPC (extras `serve` and `client`).

Every name below is imported when it is first used.
"""

import importlib as _importlib
import typing as _typing

from pykv.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    MissingExtraError,
    ModelError,
    OutOfBlocksError,
    PoisonedError,
    PykvError,
    QueueFullError,
    StepError,
    UnknownRequestError,
    UnsupportedModelError,
)
from pykv.extras import needs_extra as _needs_extra

if _typing.TYPE_CHECKING:
    from pykv.attention import copy_blocks, paged_attention, write_kv
    from pykv.client import Client
    from pykv.engine import AsyncEngine, Engine, EngineConfig
    from pykv.kv_pool import KvPool
    from pykv.layout import KvLayout
    from pykv.sampling import SamplingParams
    from pykv.scheduler import Plan, RequestSummary, Scheduler, SchedulerConfig, SchedulerStats, StepBuffers

    __version__: str

__all__ = [
    "AsyncEngine",
    "CapacityError",
    "Client",
    "ConfigError",
    "DuplicateRequestError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "InvalidRequestError",
    "KvLayout",
    "KvPool",
    "MissingExtraError",
    "ModelError",
    "OutOfBlocksError",
    "Plan",
    "PoisonedError",
    "PykvError",
    "QueueFullError",
    "RequestSummary",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "StepBuffers",
    "StepError",
    "UnknownRequestError",
    "UnsupportedModelError",
    "copy_blocks",
    "paged_attention",
    "write_kv",
]

# name: (the module that defines it, the extra that brings the module's dependencies)
_LAZY = {
    "AsyncEngine": ("pykv.engine", "models"),
    "Client": ("pykv.client", "client"),
    "Engine": ("pykv.engine", "models"),
    "EngineConfig": ("pykv.engine", "models"),
    "KvLayout": ("pykv.layout", ""),
    "KvPool": ("pykv.kv_pool", "torch"),
    "Plan": ("pykv.scheduler", ""),
    "RequestSummary": ("pykv.scheduler", ""),
    "SamplingParams": ("pykv.sampling", ""),
    "Scheduler": ("pykv.scheduler", ""),
    "SchedulerConfig": ("pykv.scheduler", ""),
    "SchedulerStats": ("pykv.scheduler", ""),
    "StepBuffers": ("pykv.scheduler", ""),
    "copy_blocks": ("pykv.attention", "torch"),
    "paged_attention": ("pykv.attention", "torch"),
    "write_kv": ("pykv.attention", "torch"),
}


def _load(name: str) -> object:
    if name == "__version__":
        return _importlib.import_module("importlib.metadata").version("pykv-cache")
    if name not in _LAZY:
        raise AttributeError(f"module 'pykv' has no attribute {name!r}")
    module, extra = _LAZY[name]
    with _needs_extra(f"pykv.{name}", extra):
        return getattr(_importlib.import_module(module), name)


if not _typing.TYPE_CHECKING:  # a type checker would take every misspelt name for an object

    def __getattr__(name):
        """Imports a public name when it is first used (PEP 562)."""
        return globals().setdefault(name, _load(name))


def __dir__() -> list[str]:
    """What is public."""
    return sorted(__all__)
