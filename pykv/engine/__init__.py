"""The engine: the step loop over scheduler, model and sampler, and its asynchronous face.

The names load when they are first used, so that configs and outputs need neither torch nor transformers.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from pykv.engine.async_engine import AsyncEngine
    from pykv.engine.config import EngineConfig
    from pykv.engine.engine import Engine
    from pykv.engine.outputs import Completion, OutputDelta, RequestOutput, TokenLogprobs, Usage
    from pykv.engine.stats import EngineStats

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "OutputDelta",
    "RequestOutput",
    "TokenLogprobs",
    "Usage",
]

_HOMES = {
    "AsyncEngine": "pykv.engine.async_engine",
    "Completion": "pykv.engine.outputs",
    "Engine": "pykv.engine.engine",
    "EngineConfig": "pykv.engine.config",
    "EngineStats": "pykv.engine.stats",
    "OutputDelta": "pykv.engine.outputs",
    "RequestOutput": "pykv.engine.outputs",
    "TokenLogprobs": "pykv.engine.outputs",
    "Usage": "pykv.engine.outputs",
}


if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        """Imports a public name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'pykv.engine' has no attribute {name!r}")
        return globals().setdefault(name, getattr(_importlib.import_module(_HOMES[name]), name))
