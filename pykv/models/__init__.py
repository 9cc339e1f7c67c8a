"""Models of transformers, unchanged, over a paged KV cache.

- `load_model` finds, reads and checks a model, and gives a `CausalModel` and its tokenizer.
- `CausalModel.forward` runs one packed step; a `StepContext` says where its KV goes.

The names load when they are first used, so that `pykv.KvLayout` needs none of torch and transformers.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from pykv.models.causal_model import CausalModel
    from pykv.models.load import load_model
    from pykv.models.step_context import StepContext

__all__ = ["CausalModel", "StepContext", "load_model"]

_HOMES = {
    "CausalModel": "pykv.models.causal_model",
    "StepContext": "pykv.models.step_context",
    "load_model": "pykv.models.load",
}


if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        """Imports a public name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'pykv.models' has no attribute {name!r}")
        return globals().setdefault(name, getattr(_importlib.import_module(_HOMES[name]), name))
