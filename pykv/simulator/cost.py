"""How long a step takes: a formula with a few parts, and what says them.

A text gives them by hand, names a device and a model, or a file that `pykv fit` wrote.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number_in, shown
from pykv.kv_format import BF16, USUAL_HEAD_DIM, KvFormat
from pykv.planner.tables import gpu_table
from pykv.simulator.roofline import Device
from pykv.simulator.served_model import ServedModel, served_model

__all__ = ["DEFAULT_COST", "CostModel", "StepCost", "read_cost"]

DEFAULT_COST = "roofline:H100,model=llama-3.1-8b"

_MOST_SECONDS = 3600.0
_BY_HAND = ("parameters", "kv_bytes", "bytes_per_parameter", "pair_flops")
_OF_DEVICE = ("flops", "bandwidth", "efficiency", "fixed", "host_bandwidth")
_MOST = {"flops": 1e20, "bandwidth": 1e18, "host_bandwidth": 1e18, "parameters": 1e15, "kv_bytes": 1e12}
_MOST |= {"bytes_per_parameter": 64.0, "pair_flops": 1e15, "efficiency": 1.0, "fixed": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: `fixed + sequences + swaps + (compute and memory)`.

    Attributes:
        fixed: of every step.
        per_sequence: of each sequence in the batch.
        per_token: compute, of each token.
        per_pair: compute, of each (token, token that it attends to).
        weights: memory, of reading the weights that every step reads.
        experts: memory, of reading all experts: a step reads those that one of its tokens is sent to.
        expert_share: the share of the experts that one token is sent to, any as likely as another; from 0 to 1.
        per_context_token: memory, of each token whose keys and values are read.
        window: tokens that layers with a window see; 0: there is no such layer.
        per_window_pair, per_window_token: as per_pair and per_context_token, of the layers with a window, which see no
            more than it.
        per_swapped_block: of each block that is copied to or from the host.
        overlaps: whether the larger of compute and memory counts, as in a roofline, or their sum.
    """

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    weights: float = 0.0
    experts: float = 0.0
    expert_share: float = 0.0
    per_context_token: float = 0.0
    window: int = 0
    per_window_pair: float = 0.0
    per_window_token: float = 0.0
    per_swapped_block: float = 0.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        as_boolean("overlaps", self.overlaps, ConfigError)
        object.__setattr__(self, "window", as_integer("window", self.window, 0, 2**30, ConfigError))
        for name in (field.name for field in fields(self) if field.name not in ("overlaps", "window")):
            most = 1.0 if name == "expert_share" else _MOST_SECONDS
            object.__setattr__(self, name, as_number_in(name, getattr(self, name), 0.0, most, ConfigError))

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The model that a text names.

        Args:
            text: `constant:SECONDS`; `linear:FIELD=SECONDS,...`; `roofline:GPU,model=NAME`, both by the names of
                `pykv plan`, or in the place of the model `parameters=N,kv_bytes=N`; or the path of a JSON file.

        Raises:
            ConfigError: the text is none of these.
        """
        return read_cost(text).model

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Reads a file that `save` or `pykv fit` wrote.

        Raises:
            ConfigError: it is no such file.
            OSError: it cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text())
            values = content["cost_model"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no cost model: {error!r}") from error
        _check_parts(values)
        return cls(**values)

    def save(self, path: str | os.PathLike[str], **about: Any) -> None:
        """Writes a JSON file.

        Args:
            path: of the file.
            about: what else to write beside the model.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(json.dumps({"cost_model": asdict(self), **about}, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class StepCost:
    """A cost model and where it is from.

    Attributes:
        model: seconds of a step.
        served: the model whose steps these are; None: the text names none.
        kv_bytes: of a token in 16 bit, given by hand; None: the served model says it, or nothing does.
        is_roofline: whether it follows the dtype of the cache.
        assumed: what was not given and is taken for granted, in words.
    """

    model: CostModel
    served: ServedModel | None = None
    kv_bytes: float | None = None
    is_roofline: bool = False
    assumed: tuple[str, ...] = ()


def read_cost(
    cost: str | CostModel | None,
    *,
    model: str | os.PathLike[str] | None = None,
    kv_format: KvFormat = BF16,
    block_size: int = 16,
) -> StepCost:
    """What a text or a model says; None: `DEFAULT_COST`, on the `model` if one is given.

    Args:
        cost: `constant:SECONDS`; `linear:FIELD=SECONDS,...`; `roofline:GPU,model=NAME`, both by the names of
            `pykv plan`, or in the place of the model `parameters=N,kv_bytes=N`; or the path of a JSON file.
        model: what is served, where the cost names no model.
        kv_format: how the cache is stored: a roofline reads so much of it.
        block_size: tokens a block, for what a swap copies.

    Raises:
        ConfigError: the text is none of these, half of a model is given, or both name a model.
        ModelError: the model's files cannot be read.
    """
    assumed: tuple[str, ...] = ()
    if cost is None:
        cost = DEFAULT_COST if model is None else DEFAULT_COST.partition(",")[0]
        assumed = (f"a step costs what {cost} says",)
    if isinstance(cost, str) and cost.startswith("roofline:"):
        found = _roofline(cost.removeprefix("roofline:"), model, kv_format, block_size)
        return replace(found, assumed=(*assumed, *found.assumed))
    served = None if model is None else served_model(model)
    return StepCost(cost if isinstance(cost, CostModel) else _formula(cost), served)


def _formula(text: str) -> CostModel:
    kind, separator, rest = text.partition(":")
    if separator and kind == "constant":
        return CostModel(fixed=_number("constant", rest))
    if separator and kind == "linear":
        values = _parts(rest)
        _check_parts(values)
        if "overlaps" in values:
            raise ConfigError("overlaps: not allowed in a linear cost, whose parts are added up")
        numbers: dict[str, Any] = {name: _number(name, value) for name, value in values.items()}
        if (window := numbers.get("window")) is not None and window.is_integer():
            numbers["window"] = int(window)
        return CostModel(**numbers)
    if os.path.isfile(text):  # of a name that no file can have Path raises
        return CostModel.load(text)
    raise ConfigError(
        f"cost is {shown(text)}: allowed are constant:SECONDS, linear:FIELD=SECONDS,..., roofline:GPU,..., or the "
        "path of a JSON file"
    )


def _check_parts(values: object) -> None:
    """Refuses parts that a cost model does not have."""
    known = {field.name for field in fields(CostModel)}
    if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
        found = unknown if isinstance(values, dict) else values
        raise ConfigError(f"cost model: {found} is unknown: allowed are {', '.join(sorted(known))}")


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


def _roofline(
    text: str, model: str | os.PathLike[str] | None, kv_format: KvFormat, block_size: int
) -> StepCost:
    gpu_name, _, rest = text.partition(",")
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
    cost = CostModel(**device.serving(served, kv_format, block_size))
    return StepCost(cost, served, is_roofline=True)


def _by_hand(
    gpu_name: str,
    device: Device,
    values: dict[str, float],
    dtype: str | None,
    kv_format: KvFormat,
    block_size: int,
) -> StepCost:
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
    cost = CostModel(**device.serving_by_hand(values, kv_format, block_size))
    return StepCost(cost, None, values["kv_bytes"], is_roofline=True, assumed=assumed)


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
