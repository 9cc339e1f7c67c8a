"""The gate: a model is served only if every check says that its tokens will be its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pykv.attention.backends import backend_for
from pykv.errors import ConfigError, UnsupportedModelError
from pykv.field_checks import as_integer, optional
from pykv.kv_format import DtypeFormat, KvFormat, kv_format_of
from pykv.kv_pool import CACHE_DTYPES
from pykv.layout import KvLayout
from pykv.models.attention_function import ATTENTION_NAME, register_attention
from pykv.models.causal_model import CausalModel
from pykv.models.float32_weights import float32_fits, float32_weights
from pykv.models.probe import eager_logits, paged_logits
from pykv.models.rotary import rotary_limit
from pykv.models.timed_step import timed_step

__all__ = ["admit", "check_backend", "check_format"]

# The error of a row of logits against the model's own is relative to the row's spread. In float32 no row may
# be off by more than rounding. In 16 bits rounding alone can turn a router to another expert, so there the
# median row counts; an attention that is wrong is off by tens of percent in every row.
LARGEST_FLOAT32_ERROR = 1e-4
LARGEST_MEDIAN_ERROR = 1e-1

CHECK = "the attention and its specification compute a few tokens, and both must agree"

FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def admit(
    module: nn.Module,
    *,
    name: str,
    eos_token_ids: frozenset[int] = frozenset(),
    max_model_len: int | None = None,
    attention_backend: str = "auto",
) -> CausalModel:
    """Checks a model and makes it ready to run over a paged pool.

    Args:
        module: a causal language model of transformers. Afterwards it is in evaluation mode and its attention
            implementation is "pykv"; where it is refused its implementation is as before.
        name, eos_token_ids, max_model_len: see `CausalModel`; the context is also capped by the model's own.
        attention_backend: that will serve.

    Raises:
        UnsupportedModelError: the model fails a check; the message names the check.
        ConfigError: max_model_len is below 1, or this machine cannot run the backend.
    """
    checked = _checked_architecture(module)
    check_backend(attention_backend, checked.device)
    config = checked.config.get_text_config(decoder=True)
    model = CausalModel(
        module=checked,
        config=config,
        layout=KvLayout.from_config(checked.config),
        dtype=_checked_dtype(checked),
        device=checked.device,
        vocab_size=config.vocab_size,
        max_model_len=_context_limit(config, max_model_len),
        eos_token_ids=eos_token_ids,
        name=name,
    )
    register_attention()
    checked.eval()
    with _implementation_restored(checked):
        _probe(model, attention_backend)
    return model


def check_backend(attention_backend: str, device: torch.device) -> None:
    """Raises ConfigError unless this machine can run the attention backend on this device."""
    try:
        backend_for(attention_backend, device, torch.float32, option="attention_backend")
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def check_format(
    model: CausalModel, format: KvFormat, attention_backend: str, tell: Callable[[str], None]
) -> None:
    """Compares what the backend computes over a cache of a format with what the specification does.

    What the format itself costs is no fault, so the model's own logits are no measure here.

    Args:
        tell: told of the check, if there is something to compare.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    if not isinstance(format, DtypeFormat) or format == kv_format_of(model.dtype):
        return  # computed by the specification; or what was compared when the model was admitted
    what = f"checking a cache of {format.name}"
    with timed_step(tell, what, CHECK), _failures_named(f"over a cache of {format.name}"):
        expected, found = (paged_logits(model, backend, format) for backend in ("torch", attention_backend))
    _check_rounded(expected, found)


def _probe(model: CausalModel, attention_backend: str) -> None:
    """Compares in float32, where nothing hides behind rounding, if memory allows it; then as served.

    The first is about the model, so it runs the specification; a GPU need not compile kernels that will not serve.
    """
    if model.dtype != torch.float32 and float32_fits(model.module):
        with float32_weights(model.module):
            exact = replace(model, dtype=torch.float32)
            _check_float32(_own_logits(exact), _paged_logits(exact, "torch"))
    check = _check_float32 if model.dtype == torch.float32 else _check_rounded
    check(_own_logits(model), _paged_logits(model, attention_backend))


def _checked_architecture(module: nn.Module) -> Any:
    checked: Any = module  # many of its methods have no types
    if not isinstance(module, PreTrainedModel):
        raise UnsupportedModelError(
            f"check 'architecture': {type(module).__name__} is no model of transformers (PreTrainedModel)"
        )
    if not checked.is_backend_compatible():
        raise UnsupportedModelError(
            f"check 'attention backend': {type(module).__name__} does not let its attention be replaced"
        )
    if checked.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"check 'architecture': {type(module).__name__} gives no logits for tokens"
        )
    return module


def _context_limit(config: Any, max_model_len: int | None) -> int:
    """The smallest of what the model was made for, what is asked for and what its rotary embedding allows."""
    optional(as_integer, "max_model_len", max_model_len, 1, 2**30, ConfigError)
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", max_model_len)
    if own is None:
        raise ConfigError(
            "max_model_len is None, but the model's config does not say how long its context is"
        )
    fixed = rotary_limit(config)
    if fixed is not None and max_model_len is not None and max_model_len > fixed:
        raise UnsupportedModelError(
            f"check 'rotary': beyond {fixed} tokens the model's rotary frequencies depend on the other "
            f"sequences of the batch; max_model_len is {max_model_len}, {fixed} is allowed"
        )
    return min(length for length in (own, fixed, max_model_len) if length is not None)


@contextmanager
def _implementation_restored(module: Any) -> Iterator[None]:
    """Gives a model that is refused the attention back that it had."""
    before = module.config._attn_implementation
    try:
        yield
    except BaseException:
        module.set_attn_implementation(before)
        raise


def _checked_dtype(module: PreTrainedModel) -> torch.dtype:
    if module.dtype not in CACHE_DTYPES:
        allowed = ", ".join(map(str, CACHE_DTYPES))
        raise UnsupportedModelError(f"check 'dtype': the weights are {module.dtype}; served are {allowed}")
    return module.dtype


def _own_logits(model: CausalModel) -> Tensor:
    model.module.set_attn_implementation("eager")
    with _failures_named("by itself"):
        return eager_logits(model)


def _paged_logits(model: CausalModel, attention_backend: str) -> Tensor:
    """Leaves the model with pykv's attention."""
    model.module.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(
            f"check 'attention backend': the attention stays {model.config._attn_implementation!r}"
        )
    with _failures_named("over a paged pool"):
        return paged_logits(model, attention_backend)


@contextmanager
def _failures_named(how: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:  # an option's fault, not the model's
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"check 'probe': the model fails {how}: {type(error).__name__}: {error}"
        ) from error


def _check_float32(expected: Tensor, found: Tensor) -> None:
    _check_error(float(_row_errors(expected, found).max()), LARGEST_FLOAT32_ERROR, "a row in float32")


def _check_rounded(expected: Tensor, found: Tensor) -> None:
    _check_error(
        float(_row_errors(expected, found).median()), LARGEST_MEDIAN_ERROR, "the median row in 16 bits"
    )


def _check_error(error: float, allowed: float, what: str) -> None:
    if not error <= allowed:  # also where it is not a number
        raise UnsupportedModelError(
            f"check 'probe logits': the logits differ from the model's own by {error:.1e} of their spread; "
            f"{allowed:.0e} is allowed for {what}"
        )


def _row_errors(expected: Tensor, found: Tensor) -> Tensor:
    """The root mean square error of each row [num_rows], relative to the row's standard deviation."""
    error = (found - expected).square().mean(dim=1).sqrt()
    return error / expected.std(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
