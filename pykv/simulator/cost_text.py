"""Texts that say how long a step takes: a sum by hand, a device with a model, or a file that `pykv fit` wrote."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.kv_format import BF16, USUAL_HEAD_DIM, KvFormat
from pykv.planner.tables import gpu_table
from pykv.simulator.roofline import Device
from pykv.simulator.served_model import ServedModel, served_model

__all__ = ["Roofline", "cost_parts", "is_roofline", "read_roofline", "saved_parts"]

_ROOFLINE = "roofline:"
_BY_HAND = ("parameters", "kv_bytes", "bytes_per_parameter", "pair_flops")
_OF_DEVICE = ("flops", "bandwidth", "efficiency", "fixed", "host_bandwidth")
_MOST = {"flops": 1e20, "bandwidth": 1e18, "host_bandwidth": 1e18, "parameters": 1e15, "kv_bytes": 1e12}
_MOST |= {"bytes_per_parameter": 64.0, "pair_flops": 1e15, "efficiency": 1.0, "fixed": 3600.0}


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a text says of a device and a model.

    Attributes:
        parts: of a step's cost, by their names in `CostModel`.
        served: the model that it names; None: its numbers are given by hand.
        kv_bytes: of a token in 16 bit, given by hand; None: the model says it.
        assumed: what was not given and is taken for granted, in words.
    """

    parts: dict[str, Any]
    served: ServedModel | None
    kv_bytes: float | None = None
    assumed: tuple[str, ...] = ()


def cost_parts(text: str) -> object:
    """The parts of a step's cost, by name. Of `linear:` and of a file, the names are as they stand there.

    Args:
        text: `constant:SECONDS`; `linear:FIELD=SECONDS,...`; `roofline:GPU,model=NAME`, both by the names of
            `pykv plan`, or in the place of the model `parameters=N,kv_bytes=N`; or the path of a JSON file.

    Raises:
        ConfigError: the text is none of these.
    """
    if is_roofline(text):
        return read_roofline(text).parts
    kind, separator, rest = text.partition(":")
    if separator and kind == "constant":
        return {"fixed": _number("constant", rest)}
    if separator and kind == "linear":
        return _linear(rest)
    if os.path.isfile(text):  # of a name that no file can have Path raises
        return saved_parts(text)
    raise ConfigError(
        f"cost is {shown(text)}: allowed are constant:SECONDS, linear:FIELD=SECONDS,..., roofline:GPU,..., or the "
        "path of a JSON file"
    )


def saved_parts(path: str | os.PathLike[str]) -> object:
    """What a file that `CostModel.save` wrote holds for the parts.

    Raises:
        ConfigError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        return json.loads(Path(path).read_text())["cost_model"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no cost model: {error!r}") from error


def is_roofline(text: str) -> bool:
    """Whether a text names a device."""
    return text.startswith(_ROOFLINE)


def read_roofline(
    text: str,
    *,
    model: str | os.PathLike[str] | None = None,
    kv_format: KvFormat = BF16,
    block_size: int = 16,
) -> Roofline:
    """What a text that names a device says.

    Args:
        text: `roofline:GPU,...`.
        model: what is served, where the text names no model.
        kv_format: how the cache is stored: a step reads so much of it.
        block_size: tokens a block, for what a swap copies.

    Raises:
        ConfigError: a part is unknown or not allowed, half of a model is given, or both name a model.
        ModelError: the model's files cannot be read.
    """
    gpu_name, _, rest = text.removeprefix(_ROOFLINE).partition(",")
    gpu = gpu_table(gpu_name)
    parts = _parts(rest)
    named, dtype = parts.pop("model", None), parts.pop("weights_dtype", None)
    if named and model is not None:
        raise ConfigError(
            f"model is {shown(str(model))}, and cost names {shown(named)}: allowed is one of them"
        )
    if unknown := sorted(set(parts) - {*_BY_HAND, *_OF_DEVICE}):
        known = ", ".join(sorted({"model", "weights_dtype", *_BY_HAND, *_OF_DEVICE}))
        raise ConfigError(f"cost model: {unknown} is unknown: allowed are {known}")
    values = {name: _positive(name, value) for name, value in parts.items()}
    device = Device.of(gpu, values)
    chosen = named or model
    if chosen is None:
        return _by_hand(gpu_name, device, values, dtype, kv_format, block_size)
    if both := [name for name in _BY_HAND if name in values]:
        raise ConfigError(
            f"cost gives {', '.join(both)} beside the model {shown(str(chosen))}: allowed is one of them"
        )
    served = served_model(chosen, dtype)
    return Roofline(device.serving(served, kv_format, block_size), served)


def _by_hand(
    gpu_name: str,
    device: Device,
    values: dict[str, float],
    dtype: str | None,
    kv_format: KvFormat,
    block_size: int,
) -> Roofline:
    assumed: tuple[str, ...] = ()
    missing = [name for name in ("parameters", "kv_bytes") if name not in values]
    if missing:
        raise ConfigError(
            f"cost is 'roofline:{gpu_name},...' without {' and '.join(missing)}: allowed is model=NAME, or both "
            "parameters= and kv_bytes="
        )
    if dtype is not None:
        raise ConfigError("cost gives weights_dtype without a model: allowed there is bytes_per_parameter=")
    if "bytes_per_parameter" not in values:
        assumed = (
            *assumed,
            "weights of 2 bytes a parameter, all of which each token passes and each step reads",
        )
    if "pair_flops" not in values:
        assumed = (*assumed, "attention computes nothing, as pair_flops is not given")
    # Of such a model the head size, and so how many scales there are, is not known.
    if kv_format != BF16:
        assumed = (*assumed, f"heads of {USUAL_HEAD_DIM} elements")
    parts = device.serving_by_hand(values, kv_format, block_size)
    return Roofline(parts, None, values["kv_bytes"], assumed)


def _linear(text: str) -> dict[str, Any]:
    values = _parts(text)
    if "overlaps" in values:
        raise ConfigError("overlaps: not allowed in a linear cost, whose parts are added up")
    numbers: dict[str, Any] = {name: _number(name, value) for name, value in values.items()}
    if (window := numbers.get("window")) is not None and window.is_integer():
        numbers["window"] = int(window)
    return numbers


def _parts(text: str) -> dict[str, str]:
    """What `name=value,...` says.

    Raises:
        ConfigError: a name is given twice.
    """
    parts: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in parts:
            raise ConfigError(f"cost gives {name} twice: allowed is once")
        parts[name] = value
    return parts


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {shown(text)}: allowed is a number") from None


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if not 0 < value <= _MOST[name]:
        raise ConfigError(f"{name} is {text}: allowed is above 0 and at most {_MOST[name]:g}")
    return value
