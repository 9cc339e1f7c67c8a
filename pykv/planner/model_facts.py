"""What the planner has to know of a model, from a folder, a config, the shipped table or numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError, ModelError, UnsupportedModelError
from pykv.field_checks import shown
from pykv.layout import KvLayer, KvLayout
from pykv.models.kv_fields import NUM_HEADS, ConfigFields
from pykv.models.unread_fields import NotSaidError
from pykv.planner.checks import refused
from pykv.planner.engine_storage import EngineStorage
from pykv.planner.formats import WEIGHT_BITS, weights_dtype
from pykv.planner.options import HandNumbers, PlanOptions
from pykv.planner.parameters import (
    Experts,
    Parameters,
    embedding_parameters,
    estimate_parameters,
    experts_of,
    input_embedding,
)
from pykv.planner.state_layers import StateLayers, split_layers
from pykv.planner.tables import known_model
from pykv.planner.weights import Weights, bytes_of_files, bytes_of_parameters

__all__ = ["ModelFacts", "read_model"]

BUNDLED = "HuggingFaceTB/SmolLM2-135M"
CONTEXT_CAP = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
QUANTIZATIONS = {"fp8": "fp8", "mxfp4": "mxfp4", "fbgemm_fp8": "fp8"}
DEFAULT_DTYPE = "bfloat16"
NO_STATE = StateLayers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the planner sees it.

    Attributes:
        name: for the report.
        layout: the layers that keep keys and values, at the least that they can take: latent attention as one latent.
        engine: how pykv's pool stores it; None: pykv does not serve the model.
        engine_refusal: why not.
        state: the layers that keep a state instead.
        num_heads: query heads; None: not known.
        max_positions: tokens that the model was made for; None: not known.
        weights: None: neither given nor to be found out.
        weights_refusal: why the parameters cannot be counted by the config; empty: they can, or there is none.
        num_parameters: None: as for the weights.
        input_embedding: those of them that a step only looks rows up in.
        experts: those of which a token is sent to a few; None: there are none, or they cannot be counted.
    """

    name: str
    layout: KvLayout
    engine: EngineStorage | None
    engine_refusal: str = ""
    state: StateLayers = NO_STATE
    num_heads: int | None = None
    max_positions: int | None = None
    weights: Weights | None = None
    weights_refusal: str = ""
    num_parameters: int | None = None
    input_embedding: int = 0
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """A config and what else its source says."""

    name: str
    config: Mapping[str, Any]
    num_parameters: int | None = None
    weights_dtype: str | None = None
    weights_bytes: int | None = None


def read_model(options: PlanOptions) -> ModelFacts:
    """The facts of the model that the options name.

    Raises:
        ConfigError: no model is given, or its name is unknown.
        ModelError, UnsupportedModelError: its files cannot be read, or its layers are of no known kind.
    """
    if options.by_hand is not None:
        return _from_numbers(options.by_hand, options)
    if options.model is None:
        raise ConfigError(
            "model is not given: allowed is a folder, a config.json, a known name, or num_layers and the like"
        )
    source = _source(options.model)
    attention, state = split_layers(_text_part(source.config))
    engine, refusal = _engine(source.config, state)
    fields = ConfigFields(source.config)
    layout = KvLayout.from_config(attention, storage="latent")
    num_heads = fields.count(*NUM_HEADS) if isinstance(fields.find(*NUM_HEADS), int) else None
    _check_heads(num_heads, layout)
    counted = _parameters(source, options, source.weights_dtype or _dtype_of_config(source.config))
    return ModelFacts(
        name=source.name,
        layout=layout,
        engine=engine,
        engine_refusal=refusal,
        state=state,
        num_heads=num_heads,
        max_positions=fields.count(*CONTEXT_CAP),
        weights=_weights(source, options),
        weights_refusal=_weights_refusal(source.config),
        num_parameters=None if counted is None else counted[0].total,
        input_embedding=input_embedding(source.config),
        experts=_experts(source.config),
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    try:
        return experts_of(config)
    except NotSaidError:
        return None


def _weights_refusal(config: Mapping[str, Any]) -> str:
    try:
        estimate_parameters(config)
    except NotSaidError as error:
        return str(error)
    return ""


def _check_heads(num_heads: int | None, layout: KvLayout) -> None:
    """Query heads share KV heads evenly, in every layer."""
    for layer in layout.layers:
        if num_heads is not None and num_heads % layer.num_kv_heads:
            raise refused("num_kv_heads", layer.num_kv_heads, f"a divisor of num_heads, which is {num_heads}")


def _engine(config: Mapping[str, Any], state: StateLayers) -> tuple[EngineStorage | None, str]:
    if state.num_layers:
        return None, f"{state.num_layers} layers keep a state"
    try:
        return EngineStorage.of_config(config), ""
    except UnsupportedModelError as error:
        return None, str(error)


def _from_numbers(numbers: HandNumbers, options: PlanOptions) -> ModelFacts:
    windowed = numbers.num_window_layers
    if numbers.latent_dim is not None:
        layer, storage = KvLayer(1, numbers.latent_dim, 0), "latent"
    else:
        assert numbers.num_kv_heads is not None
        assert numbers.head_dim is not None
        layer, storage = KvLayer(numbers.num_kv_heads, numbers.head_dim, numbers.head_dim), "expanded"
    window = replace(layer, window=numbers.window) if windowed else layer
    layers = (window,) * windowed + (layer,) * (numbers.num_layers - windowed)
    layout = KvLayout(layers, "latent" if storage == "latent" else "expanded")
    served = storage == "expanded" and not numbers.state_bytes
    return ModelFacts(
        name="by numbers",
        layout=layout,
        engine=EngineStorage(layout) if served else None,
        engine_refusal="" if served else "latents and states are not stored as such",
        state=StateLayers(1, numbers.state_bytes) if numbers.state_bytes else NO_STATE,
        num_heads=numbers.num_heads,
        weights=_weights(_Source("by numbers", {}), options),
    )


def _source(model: str | Path | Mapping[str, Any]) -> _Source:
    if isinstance(model, Mapping):
        return _Source(str(model.get("model_type", "a config")), model)
    path = Path(model)
    if os.path.isdir(path):  # of a name that no file can have Path raises
        if not (path / "config.json").is_file():
            raise ModelError(f"model is {str(path)!r}, a folder without a config.json")
        return replace(
            _file_source(path / "config.json"),
            name=path.name or str(path),
            weights_bytes=bytes_of_files(path),
        )
    if os.path.isfile(path):
        return _file_source(path)
    name, entry = known_model(BUNDLED if str(model) == "bundled" else str(model))
    dtype = entry.get("weights_dtype", DEFAULT_DTYPE)
    return _Source(name, entry["config"], entry["num_parameters"], dtype, entry.get("weights_bytes"))


def _file_source(path: Path) -> _Source:
    if path.suffix.lower() == ".gguf":
        raise ModelError(
            f"model is {str(path)!r}: of a GGUF file the planner reads nothing; give its config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model is {str(path)!r}, which is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"model is {str(path)!r}, whose JSON is no object but a {type(config).__name__}")
    return _Source(path.parent.name if path.name == "config.json" else path.stem, config)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part = next(
        (config[name] for name in ("text_config", "llm_config", "language_config") if config.get(name)), None
    )
    return part if isinstance(part, Mapping) else config


def _weights(source: _Source, options: PlanOptions) -> Weights | None:
    """What was given comes first, then the published files, then the parameters."""
    own = source.weights_dtype or _dtype_of_config(source.config)
    kept = embedding_parameters(source.config) if source.config else 0
    if options.weights_bytes is not None:
        return Weights(options.weights_bytes, options.weights_dtype or own or DEFAULT_DTYPE, "given", kept)
    wanted = options.weights_dtype or own
    if source.weights_bytes is not None and wanted == own:
        return Weights(source.weights_bytes, own or "as stored", "the size of the files", kept)
    counted = _parameters(source, options, own)
    if counted is None:
        return None
    if wanted is None:
        raise refused(
            "weights_dtype", None, f"{', '.join(WEIGHT_BITS)}, as the config names none that is known"
        )
    parameters, how = counted
    words = f"{parameters.total:,} parameters{how}"
    return Weights(bytes_of_parameters(parameters, wanted), wanted, words, parameters.embedding)


def _parameters(source: _Source, options: PlanOptions, own: str | None) -> tuple[Parameters, str] | None:
    """How many, and a word on how they were counted."""
    embedding = embedding_parameters(source.config) if source.config else 0
    if options.num_parameters is not None:
        return Parameters(options.num_parameters, min(embedding, options.num_parameters)), ""
    if source.num_parameters is not None:
        return Parameters(source.num_parameters, embedding), ""
    if source.weights_bytes is not None and own is not None:
        total = int(Fraction(source.weights_bytes * 8) / WEIGHT_BITS[own])
        return Parameters(total, min(embedding, total)), ", by the size of the files"
    if not source.config:
        return None
    try:
        return estimate_parameters(source.config), ", an estimate by the config"
    except NotSaidError:
        return None


def _dtype_of_config(config: Mapping[str, Any]) -> str | None:
    """The dtype of the weights as published; None: in one that is not known here."""
    quantization = config.get("quantization_config")
    if quantization is not None:
        if not isinstance(quantization, Mapping):
            raise UnsupportedModelError(
                f"check 'weights': quantization_config is {shown(quantization)}: allowed is an object with quant_method"
            )
        return _dtype_of_quantization(ConfigFields(quantization))
    named = _text_part(config).get("dtype") or _text_part(config).get("torch_dtype")
    named = named or config.get("dtype") or config.get("torch_dtype")
    if named is None:
        return DEFAULT_DTYPE
    return weights_dtype(named) if isinstance(named, str) and named in WEIGHT_BITS else None


def _dtype_of_quantization(fields: ConfigFields) -> str | None:
    method = fields.text("quant_method")
    if method in ("awq", "gptq"):
        return {4: "int4", 8: "int8"}.get(fields.count("bits", "w_bit") or 0)
    return QUANTIZATIONS.get(method or "")
