"""The options of a plan: named, checked and read once, before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.kv_format import KvFormat
from pykv.near_names import near_or_all
from pykv.planner.checks import checked_choice, checked_count, checked_share, refused
from pykv.planner.formats import is_eight_bit, kv_format, weights_dtype
from pykv.planner.length_files import read_histogram, read_trace
from pykv.planner.lengths import LengthDistribution, read_context
from pykv.planner.sizes import read_bytes, read_parameters
from pykv.planner.tables import Gpu, gpu_table

__all__ = ["STORAGES", "HandNumbers", "PlanOptions", "read_options"]

STORAGES = ("engine", "formula")
LARGEST_CONTEXT = 2**30
HAND_NAMES = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "num_heads",
    "window",
    "num_window_layers",
    "latent_dim",
    "state_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandNumbers:
    """A model described by numbers; `latent_dim` stands in for KV heads and head size.

    Attributes:
        num_layers, num_kv_heads, head_dim, num_heads: num_heads None: not known.
        window, num_window_layers: the window of some layers, in tokens, and of how many; 0 layers: none has one.
        latent_dim: elements of a token's latent in one layer, of multi-head latent attention.
        state_bytes: of all layers that keep a state, for one sequence.
    """

    num_layers: int
    num_kv_heads: int | None
    head_dim: int | None
    num_heads: int | None
    window: int | None
    num_window_layers: int
    latent_dim: int | None
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is asked for, checked.

    Attributes:
        model: a folder, a config.json, a name, or a config; None: by_hand.
        by_hand: the model's numbers.
        gpu: a known GPU; None: memory was given, or nothing.
        memory_bytes: of each GPU; None: not given, so nothing is said about how many fit.
        in_use_bytes: of each GPU, held by other processes.
        num_gpus, tensor_parallel: each copy of the model spans tensor_parallel GPUs.
        utilization: the share of a GPU's memory that the engine may take.
        reserve_bytes: of each GPU, for activations and the like, within that share.
        num_parameters, weights_bytes, weights_dtype: None: as the model has them.
        kv_format, block_size, num_blocks, storage: of the KV pool.
        max_model_len, max_num_seqs, watermark: as for the scheduler; None: the model's cap, as many as fit.
        lengths: the contexts of requests, in tokens, at their ends; None: not given.
        held: the tokens that a trace's requests hold at a decode step; None: no trace was given.
        shared_prefix: tokens that all requests begin with.
        users: a number of requests to look at; None: those that fit.
        risk: the chance that the lengths of a mix pass the pool.
    """

    model: str | Path | Mapping[str, Any] | None
    by_hand: HandNumbers | None
    gpu: Gpu | None
    memory_bytes: tuple[int, ...] | None
    in_use_bytes: int
    num_gpus: int
    tensor_parallel: int
    utilization: float
    reserve_bytes: int
    num_parameters: int | None
    weights_bytes: int | None
    weights_dtype: str | None
    kv_format: KvFormat
    block_size: int
    num_blocks: int | None
    storage: str
    max_model_len: int | None
    max_num_seqs: int | None
    watermark: float
    lengths: LengthDistribution | None
    held: LengthDistribution | None
    shared_prefix: int
    users: int | None
    risk: float

    @property
    def num_replicas(self) -> int:
        """How many copies of the model the GPUs hold."""
        return self.num_gpus // self.tensor_parallel


DEFAULTS: dict[str, Any] = {
    "model": None,
    **dict.fromkeys(HAND_NAMES),
    "gpu": None,
    "memory": None,
    "in_use": 0,
    "num_gpus": None,
    "tensor_parallel": None,
    "utilization": 0.9,
    "reserve": 0,
    "num_parameters": None,
    "weights_bytes": None,
    "weights_dtype": None,
    "kv_dtype": "bf16",
    "kv_scales": "token_head",
    "block_size": 16,
    "num_blocks": None,
    "storage": "engine",
    "max_model_len": None,
    "max_num_seqs": None,
    "watermark": 0.0,
    "context": None,
    "histogram": None,
    "trace": None,
    "shared_prefix": 0,
    "users": None,
    "risk": 0.01,
}
ALTERNATIVES = (
    ("gpu", "memory"),
    ("gpu", "num_blocks"),
    ("memory", "num_blocks"),
    ("num_parameters", "weights_bytes"),
    ("context", "histogram"),
    ("context", "trace"),
    ("histogram", "trace"),
)


def read_options(given: Mapping[str, Any]) -> PlanOptions:
    """Checks the options of a plan and reads the files that they name.

    Raises:
        ConfigError: an option is unknown, has a value that is not allowed, or two contradict each other; the message
            names the option, the value and what is allowed.
    """
    _check_names(given)
    values = DEFAULTS | {name: value for name, value in given.items() if value is not None}
    _check_alternatives(values)
    num_gpus, tensor_parallel = _gpus(values)
    lengths, held = _lengths(values)
    shared_prefix = checked_count("shared_prefix", values["shared_prefix"], 0, LARGEST_CONTEXT)
    if lengths is not None and shared_prefix > lengths.tokens[-1]:
        raise refused(
            "shared_prefix", shared_prefix, f"at most the longest context, which is {lengths.tokens[-1]}"
        )
    return PlanOptions(
        model=_model(values["model"]),
        by_hand=_hand_numbers(values),
        gpu=None if values["gpu"] is None else gpu_table(_text("gpu", values["gpu"])),
        memory_bytes=_memory(values, num_gpus),
        in_use_bytes=read_bytes("in_use", values["in_use"], zero=True),
        num_gpus=num_gpus,
        tensor_parallel=tensor_parallel,
        utilization=checked_share("utilization", values["utilization"], open_below=True),
        reserve_bytes=read_bytes("reserve", values["reserve"], zero=True),
        num_parameters=_optional(values, "num_parameters", read_parameters),
        weights_bytes=_optional(values, "weights_bytes", read_bytes),
        weights_dtype=None if values["weights_dtype"] is None else weights_dtype(values["weights_dtype"]),
        kv_format=_kv_format(values, given),
        block_size=checked_count("block_size", values["block_size"], 1, 65_536),
        num_blocks=_optional_count(values, "num_blocks", 2, 2**30),
        storage=checked_choice("storage", values["storage"], STORAGES),
        max_model_len=_optional_count(values, "max_model_len", 2, LARGEST_CONTEXT),
        max_num_seqs=_optional_count(values, "max_num_seqs", 1, 2**20),
        watermark=checked_share("watermark", values["watermark"], open_above=True),
        lengths=lengths,
        held=held,
        shared_prefix=shared_prefix,
        users=_optional_count(values, "users", 1, 2**30),
        risk=checked_share("risk", values["risk"], open_below=True, open_above=True),
    )


def _check_names(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        raise ConfigError(f"{unknown[0]} is no option of a plan; {near_or_all(unknown[0], DEFAULTS)}")


def _check_alternatives(values: Mapping[str, Any]) -> None:
    for first, second in ALTERNATIVES:
        if values[first] is not None and values[second] is not None:
            raise ConfigError(f"{first} and {second} are both given: allowed is one of them")


def _gpus(values: Mapping[str, Any]) -> tuple[int, int]:
    """All GPUs hold one copy of the model unless `tensor_parallel` says otherwise."""
    tensor_parallel = _optional_count(values, "tensor_parallel", 1, 2**16)
    num_gpus = _optional_count(values, "num_gpus", 1, 2**20) or tensor_parallel or 1
    ranks = tensor_parallel or num_gpus
    if num_gpus % ranks:
        raise refused("tensor_parallel", ranks, f"a divisor of num_gpus, which is {num_gpus}")
    return num_gpus, ranks


def _kv_format(values: Mapping[str, Any], given: Mapping[str, Any]) -> KvFormat:
    """The format of the cache; scales are of an 8-bit one alone."""
    found = kv_format(values["kv_dtype"], values["kv_scales"])
    if given.get("kv_scales") is not None and not is_eight_bit(found):
        raise refused(
            "kv_scales", given["kv_scales"], f"with a kv_dtype that has scales; {found.name} has none"
        )
    return found


def _memory(values: Mapping[str, Any], num_gpus: int) -> tuple[int, ...] | None:
    """The bytes of each GPU."""
    if values["gpu"] is not None:
        return (gpu_table(_text("gpu", values["gpu"])).memory_bytes,) * num_gpus
    memory = values["memory"]
    if memory is None:
        return None
    parts = (
        memory.split(",")
        if isinstance(memory, str)
        else memory
        if isinstance(memory, (list, tuple))
        else [memory]
    )
    sizes = tuple(read_bytes("memory", part) for part in parts)
    if len(sizes) == 1:
        return sizes * num_gpus
    if len(sizes) != num_gpus:
        raise refused("memory", memory, f"one size, or one for each of the {num_gpus} GPUs")
    return sizes


def _hand_numbers(values: Mapping[str, Any]) -> HandNumbers | None:
    given = [name for name in HAND_NAMES if values[name] is not None]
    if not given:
        return None
    if values["model"] is not None:
        raise ConfigError(f"model and {given[0]} are both given: allowed is one of them")
    counts = {name: _optional_count(values, name) for name in HAND_NAMES if name != "state_bytes"}
    needed = (
        ["num_layers"] if values["latent_dim"] is not None else ["num_layers", "num_kv_heads", "head_dim"]
    )
    for name in needed:
        if counts[name] is None:
            raise refused(name, None, f"a whole number above 0, as {given[0]} is given and a model is not")
    _check_hand_counts(counts)
    num_layers = counts["num_layers"] or 0
    windowed = counts["num_window_layers"] or (num_layers if counts["window"] else 0)
    return HandNumbers(
        num_layers=num_layers,
        num_kv_heads=counts["num_kv_heads"],
        head_dim=counts["head_dim"],
        num_heads=counts["num_heads"],
        window=counts["window"],
        num_window_layers=windowed,
        latent_dim=counts["latent_dim"],
        state_bytes=read_bytes("state_bytes", values["state_bytes"] or 0, zero=True),
    )


def _check_hand_counts(counts: Mapping[str, int | None]) -> None:
    for name, limit in (("num_layers", 10_000), ("num_kv_heads", 65_536), ("head_dim", 65_536)):
        if (counts[name] or 0) > limit:
            raise refused(name, counts[name], f"at most {limit:,}")
    heads, kv_heads, layers = counts["num_heads"], counts["num_kv_heads"], counts["num_layers"] or 0
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise refused("num_kv_heads", kv_heads, f"a divisor of num_heads, which is {heads}")
    for name in ("num_kv_heads", "head_dim"):
        if counts["latent_dim"] is not None and counts[name] is not None:
            raise ConfigError(f"latent_dim and {name} are both given: allowed is one of them")
    if counts["num_window_layers"] is not None and counts["window"] is None:
        raise refused("window", None, "a whole number above 0, as num_window_layers is given")
    if (counts["num_window_layers"] or 0) > layers:
        raise refused(
            "num_window_layers", counts["num_window_layers"], f"at most num_layers, which is {layers}"
        )


def _lengths(values: Mapping[str, Any]) -> tuple[LengthDistribution | None, LengthDistribution | None]:
    if values["histogram"] is not None:
        return read_histogram(_path("histogram", values["histogram"])), None
    if values["trace"] is not None:
        trace = read_trace(_path("trace", values["trace"]))
        return trace.final, trace.held
    if values["context"] is None:
        return None, None
    cap = _optional_count(values, "max_model_len", 2, LARGEST_CONTEXT)
    return read_context(values["context"], cap), None


def _model(value: object) -> str | Path | Mapping[str, Any] | None:
    if value is None or isinstance(value, (Path, Mapping)):
        return value
    if isinstance(value, str) and value.strip():
        return value
    to_dict = getattr(value, "to_dict", None)  # a config object of transformers
    if callable(to_dict):
        config: Mapping[str, Any] = to_dict()
        return config
    raise refused("model", value, "a folder, a config.json, a known name, or a config")


def _text(option: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refused(option, value, "a text that is not empty")
    return value


def _path(option: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise refused(option, value, "the path of a file")
    return Path(value)


def _optional_count(values: Mapping[str, Any], name: str, least: int = 1, most: int = 2**40) -> int | None:
    return None if values[name] is None else checked_count(name, values[name], least, most)


def _optional(values: Mapping[str, Any], name: str, read: Any) -> int | None:
    return None if values[name] is None else read(name, values[name])
