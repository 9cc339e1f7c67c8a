"""From a name to a model that has passed the gate, with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from pykv.errors import ConfigError, ModelError
from pykv.field_checks import refuse
from pykv.models.acceleration import has_packable, pack_linears
from pykv.models.causal_model import CausalModel
from pykv.models.gate import admit, check_backend
from pykv.models.hub import confirmed_by_hub
from pykv.models.probe import paged_logits
from pykv.models.quiet import offline, quiet
from pykv.models.sources import Checkpoint, find_checkpoint
from pykv.models.timed_step import say_nothing, timed_step
from pykv.torch_device import as_device, named_device

__all__ = ["load_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CHECK = "the model computes a few tokens by itself and over a paged cache, and both must agree"
PACKING = "its linear layers are arranged for this processor, and tried"

# What reading a checkpoint can raise: files that are missing, damaged, or of an unknown kind of model.
READ_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def load_model(
    source: str | Path | tuple[nn.Module, Any] = "bundled",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    max_model_len: int | None = None,
    attention_backend: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> tuple[CausalModel, Any]:
    """Loads a causal language model, passes it through the gate, and returns it with its tokenizer.

    Args:
        source: "bundled", a folder, a GGUF file, a name on the model hub (OWNER/NAME), or a pair (module, tokenizer) of
            transformers. For local models the hub is never asked, and for none with HF_HUB_OFFLINE=1.
        dtype: of the weights and the KV cache: "auto" (the checkpoint's), "float32", "bfloat16", "float16".
        device: "auto" (a GPU if there is one, and a given module's own), "cpu", "cuda", "cuda:1", …
        max_model_len: caps the context below the model's own; None: the model's own.
        attention_backend: that will serve: the model is checked with it.
        progress: is called with a line of text where a step that takes long begins, and with its seconds where it has
            ended; None: nobody is told.

    Raises:
        ModelError: nothing is there, or it cannot be read.
        UnsupportedModelError: the model fails a check of the gate.
        ConfigError: an option has a value that is not allowed, that a given module does not have, or that this machine
            cannot run.
    """
    tell = progress if progress is not None else say_nothing
    wanted = _checked_dtype(dtype)
    if isinstance(source, tuple):
        module, tokenizer = source
        _check_given(module, wanted, device)
        name = _name_of(module)
        with timed_step(tell, f"checking {name}", CHECK):
            return _admitted(module, tokenizer, name, max_model_len, attention_backend), tokenizer
    place = _chosen_device(device)
    check_backend(attention_backend, place)
    checkpoint = find_checkpoint(source, tell)
    if not checkpoint.is_local:
        checkpoint = confirmed_by_hub(checkpoint, tell)
    with timed_step(tell, f"loading {checkpoint.name}"):
        module, tokenizer = _read(checkpoint, wanted, place)
    with timed_step(tell, f"checking {checkpoint.name}", CHECK):
        model = _admitted(module, tokenizer, checkpoint.name, max_model_len, attention_backend)
    if has_packable(module):
        with timed_step(tell, f"packing {checkpoint.name}", PACKING):
            pack_linears(module, lambda: not paged_logits(model, attention_backend).isnan().any())
    return model, tokenizer


def _admitted(
    module: nn.Module, tokenizer: Any, name: str, max_model_len: int | None, attention_backend: str
) -> CausalModel:
    with quiet():
        return admit(
            module,
            name=name,
            eos_token_ids=_eos_token_ids(module, tokenizer),
            max_model_len=max_model_len,
            attention_backend=attention_backend,
        )


def _read(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> tuple[nn.Module, Any]:
    with _read_errors(checkpoint), quiet(), offline() if checkpoint.is_local else nullcontext():
        module: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.location,
            dtype="auto" if dtype is None else dtype,
            local_files_only=checkpoint.is_local,
        )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, local_files_only=checkpoint.is_local)
    module.to(device)
    return module, tokenizer


@contextmanager
def _read_errors(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except READ_ERRORS as error:
        message = f"the model at {checkpoint.location} cannot be read: {error}"
        if checkpoint.hub_problem is not None:
            message += f"; it may be in the cache only in part, and {checkpoint.hub_problem}"
        raise ModelError(message) from error


def _eos_token_ids(module: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Every token that the generation config, the config or the tokenizer calls an end."""
    holders = (getattr(module, "generation_config", None), getattr(module, "config", None), tokenizer)
    found = [getattr(holder, "eos_token_id", None) for holder in holders]
    lists = (value if isinstance(value, list) else [value] for value in found)
    return frozenset(token for tokens in lists for token in tokens if token is not None)


def _checked_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None stands for "auto"."""
    if dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        refuse("dtype", dtype, f"one of auto, {', '.join(DTYPES)}", ConfigError)
    return found


def _chosen_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return as_device("device", device)


def _check_given(module: nn.Module, dtype: torch.dtype | None, device: str | torch.device) -> None:
    """A module that the caller made is not converted or moved: that would surprise its owner."""
    weight = next(module.parameters(), None)
    if weight is None:
        raise ModelError(f"{type(module).__name__} has no weights")
    if dtype is not None and dtype != weight.dtype:
        raise ConfigError(f"dtype is {dtype}, but the given module's weights are {weight.dtype}")
    if device != "auto" and named_device("device", device).type != weight.device.type:
        raise ConfigError(f"device is {str(device)!r}, but the given module is on {str(weight.device)!r}")


def _name_of(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "name_or_path", "") or type(module).__name__
