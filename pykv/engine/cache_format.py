"""Which format an engine's KV cache gets, and whether the machine and the model can serve it."""

from __future__ import annotations

from pykv.attention.backends import backend_for
from pykv.engine.config import EngineConfig
from pykv.errors import ConfigError
from pykv.field_checks import refuse
from pykv.kv_format import CodecFormat, DtypeFormat, KvFormat, kv_format_of
from pykv.models import CausalModel

__all__ = ["chosen_format"]


def chosen_format(model: CausalModel, config: EngineConfig) -> KvFormat:
    """The format that the options ask for.

    Raises:
        ConfigError: the attention backend cannot serve it for this model.
    """
    form = kv_format_of(model.dtype if config.kv_dtype == "auto" else config.kv_dtype)
    if config.kv_scales is not None and isinstance(form, DtypeFormat):
        form = form.with_tensor_scales(*config.kv_scales)
    elif config.kv_scales is not None:
        refuse("kv_scales", config.kv_scales, f"none with the format {form.name!r}", ConfigError)
    if isinstance(form, CodecFormat):
        _check_torch_only(form, config.attention_backend)
    elif isinstance(form, DtypeFormat) and _backend_name(model, config) == "triton":
        _check_triton(form, model)
    return form


def _backend_name(model: CausalModel, config: EngineConfig) -> str:
    try:
        return backend_for(
            config.attention_backend, model.device, model.dtype, option="attention_backend"
        ).name
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_torch_only(form: CodecFormat, backend: str) -> None:
    if backend not in ("auto", "torch"):
        raise ConfigError(
            f"kv_dtype is {form.name!r}, which encodes its rows itself, and attention_backend is {backend!r}: "
            "allowed with it are auto and torch"
        )


def _check_triton(form: DtypeFormat, model: CausalModel) -> None:
    if form.tensor_scales is not None:
        raise ConfigError(
            f"kv_scales is {form.tensor_scales}, but the triton backend keeps a scale for each token and head: "
            "allowed is no kv_scales, or attention_backend torch"
        )
    sizes = {size for layer in model.layout.layers for size in (layer.head_dim_k, layer.head_dim_v)}
    if form.is_scaled and any(size % 4 for size in sizes):
        raise ConfigError(
            f"kv_dtype is {form.name!r}, and the model's head sizes are {sorted(sizes)}; the triton backend serves "
            "8 bits for multiples of 4"
        )
