"""pykv: a paged KV cache for LLM inference, with prefix sharing and a continuous-batching scheduler in Rust.

Three ways in:

- `pykv.Scheduler` for engines of your own: submit, plan, (your model runs), apply. It needs numpy alone.
- `pykv.Engine` for a causal language model of transformers (extra `models`).
- `pykv-serve` and `pykv.Client` for tokens streamed over gRPC (extras `serve` and `client`).

A step of the scheduler is planned, computed by a model of yours, and applied:

    >>> import numpy as np
    >>> import pykv
    >>> config = pykv.SchedulerConfig(num_blocks=64, block_size=16)
    >>> scheduler, step = pykv.Scheduler(config), pykv.StepBuffers(config)
    >>> request = scheduler.submit([5, 6, 7], max_tokens=1)
    >>> plan = scheduler.plan(step)
    >>> step.token_ids[: plan.num_tokens].tolist(), step.positions[: plan.num_tokens].tolist()
    ([5, 6, 7], [0, 1, 2])
    >>> sampled = np.full(plan.num_samples, 8)  # the model's choice after token 7
    >>> (ended,) = scheduler.apply(plan, sampled, np.full(plan.num_samples, pykv.OUTCOME_OK, np.uint8))
    >>> ended.output_tokens, scheduler.stats().blocks_active
    (1, 0)

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
    PinQuotaError,
    PoisonedError,
    PykvError,
    QueueFullError,
    RecordingError,
    StepError,
    TraceError,
    UnsupportedModelError,
)
from pykv.extras import needs_extra as _needs_extra

if _typing.TYPE_CHECKING:
    from pykv.attention import LayerCache, copy_blocks, paged_attention, transfer_blocks, write_kv
    from pykv.blocks import BlockCounts, BlockPool, BlockTable, PrefixCache
    from pykv.client import Client, ServiceError
    from pykv.engine import (
        AsyncEngine,
        Completion,
        Engine,
        EngineConfig,
        EngineStats,
        OutputDelta,
        RequestOutput,
        TokenLogprobs,
        Usage,
    )
    from pykv.events import KvEventKind, KvEvents, content_keys
    from pykv.kv_format import CodecFormat, KvFormat, kv_format_names, register_kv_format
    from pykv.kv_layer import KvLayer
    from pykv.kv_pool import KvPool
    from pykv.layer_groups import LayerGroups, StateGroup, StateTensor
    from pykv.layout import KvLayout
    from pykv.planner.plan import KvPlan, plan
    from pykv.recording import ReplayedRecording, replay_recording
    from pykv.retention import Retention
    from pykv.sampling import SamplingParams
    from pykv.scheduler import (
        OUTCOME_FAILED,
        OUTCOME_OK,
        OUTCOME_STOP,
        FinishReason,
        Pin,
        Plan,
        RequestSummary,
        Scheduler,
        SchedulerStats,
        StepBuffers,
    )
    from pykv.scheduler_config import SchedulerConfig
    from pykv.scope import scope_of
    from pykv.simulator.cost import CostModel
    from pykv.simulator.policy import BlockUse, EvictionPolicy
    from pykv.simulator.replay import replay
    from pykv.simulator.result import ReplayResult
    from pykv.state_pool import StatePool

    __version__: str

__all__ = [
    "OUTCOME_FAILED",
    "OUTCOME_OK",
    "OUTCOME_STOP",
    "AsyncEngine",
    "BlockCounts",
    "BlockPool",
    "BlockTable",
    "BlockUse",
    "CapacityError",
    "Client",
    "CodecFormat",
    "Completion",
    "ConfigError",
    "CostModel",
    "DuplicateRequestError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "EvictionPolicy",
    "FinishReason",
    "InvalidRequestError",
    "KvEventKind",
    "KvEvents",
    "KvFormat",
    "KvLayer",
    "KvLayout",
    "KvPlan",
    "KvPool",
    "LayerCache",
    "LayerGroups",
    "MissingExtraError",
    "ModelError",
    "OutOfBlocksError",
    "OutputDelta",
    "Pin",
    "PinQuotaError",
    "Plan",
    "PoisonedError",
    "PrefixCache",
    "PykvError",
    "QueueFullError",
    "RecordingError",
    "ReplayResult",
    "ReplayedRecording",
    "RequestOutput",
    "RequestSummary",
    "Retention",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "ServiceError",
    "StateGroup",
    "StatePool",
    "StateTensor",
    "StepBuffers",
    "StepError",
    "TokenLogprobs",
    "TraceError",
    "UnsupportedModelError",
    "Usage",
    "content_keys",
    "copy_blocks",
    "kv_format_names",
    "paged_attention",
    "plan",
    "register_kv_format",
    "replay",
    "replay_recording",
    "scope_of",
    "transfer_blocks",
    "write_kv",
]

# name: (the module that defines it, the extra that brings the module's dependencies)
_LAZY = {
    "AsyncEngine": ("pykv.engine", "models"),
    "BlockCounts": ("pykv.blocks", ""),
    "BlockPool": ("pykv.blocks", ""),
    "BlockTable": ("pykv.blocks", ""),
    "BlockUse": ("pykv.simulator.policy", ""),
    "Client": ("pykv.client", "client"),
    "CodecFormat": ("pykv.kv_format", ""),
    "Completion": ("pykv.engine", ""),
    "CostModel": ("pykv.simulator.cost", ""),
    "Engine": ("pykv.engine", "models"),
    "EngineConfig": ("pykv.engine", ""),
    "EngineStats": ("pykv.engine", ""),
    "EvictionPolicy": ("pykv.simulator.policy", ""),
    "FinishReason": ("pykv.scheduler", ""),
    "KvEventKind": ("pykv.events", ""),
    "KvEvents": ("pykv.events", ""),
    "KvFormat": ("pykv.kv_format", ""),
    "KvLayer": ("pykv.kv_layer", ""),
    "KvLayout": ("pykv.layout", ""),
    "KvPlan": ("pykv.planner.plan", ""),
    "KvPool": ("pykv.kv_pool", "torch"),
    "LayerCache": ("pykv.attention", "torch"),
    "LayerGroups": ("pykv.layer_groups", ""),
    "OUTCOME_FAILED": ("pykv.scheduler", ""),
    "OUTCOME_OK": ("pykv.scheduler", ""),
    "OUTCOME_STOP": ("pykv.scheduler", ""),
    "OutputDelta": ("pykv.engine", ""),
    "Pin": ("pykv.scheduler", ""),
    "Plan": ("pykv.scheduler", ""),
    "PrefixCache": ("pykv.blocks", ""),
    "ReplayResult": ("pykv.simulator.result", ""),
    "ReplayedRecording": ("pykv.recording", ""),
    "RequestOutput": ("pykv.engine", ""),
    "RequestSummary": ("pykv.scheduler", ""),
    "Retention": ("pykv.retention", ""),
    "SamplingParams": ("pykv.sampling", ""),
    "Scheduler": ("pykv.scheduler", ""),
    "SchedulerConfig": ("pykv.scheduler_config", ""),
    "SchedulerStats": ("pykv.scheduler", ""),
    "ServiceError": ("pykv.client", "client"),
    "StateGroup": ("pykv.layer_groups", ""),
    "StatePool": ("pykv.state_pool", "torch"),
    "StateTensor": ("pykv.layer_groups", ""),
    "StepBuffers": ("pykv.scheduler", ""),
    "TokenLogprobs": ("pykv.engine", ""),
    "Usage": ("pykv.engine", ""),
    "content_keys": ("pykv.events", ""),
    "copy_blocks": ("pykv.attention", "torch"),
    "kv_format_names": ("pykv.kv_format", ""),
    "paged_attention": ("pykv.attention", "torch"),
    "plan": ("pykv.planner.plan", ""),
    "register_kv_format": ("pykv.kv_format", ""),
    "replay": ("pykv.simulator.replay", ""),
    "replay_recording": ("pykv.recording", ""),
    "scope_of": ("pykv.scope", ""),
    "transfer_blocks": ("pykv.attention", "torch"),
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
