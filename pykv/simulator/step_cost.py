"""What a text says that a step costs: by hand, out of a device's roofline, or in a file that `pykv fit` wrote.

A roofline of a device takes the larger of two times, and adds a fixed one:

    compute = (token_flops × tokens + pair_flops × pairs that attend) / (flops × efficiency)
    memory  = (weights + experts that are used + keys and values of the contexts) / (bandwidth × efficiency)
    step    = fixed + swapped blocks + max(compute, memory)

Of layers with a window neither pairs nor reads reach beyond it. Tokens are sent to experts independently, any as likely
as another: of n experts of which a token uses k, a step of t tokens reads the share 1 - (1 - k/n)^t.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.kv_format import BF16, USUAL_HEAD_DIM, KvFormat
from pykv.planner.tables import Gpu, gpu_table
from pykv.simulator.cost import CostModel, check_parts
from pykv.simulator.served_model import ServedModel, served_model

__all__ = ["DEFAULT_COST", "EFFICIENCY", "HOST_BANDWIDTH", "STEP_SECONDS", "StepCost", "read_cost"]

DEFAULT_COST = "roofline:H100,model=llama-3.1-8b"

EFFICIENCY = 0.7
"""The share of a data sheet's compute and bandwidth that a well-made engine reaches."""
STEP_SECONDS = 5e-4
"""Of a roofline's step that neither compute nor memory explain: launches, sampling, the scheduler."""
HOST_BANDWIDTH = 25e9
"""Bytes a second of a copy to or from the host, as PCIe 4.0 of 16 lanes gives in practice."""
ALL_HANDS = ("parameters", "kv_bytes", "bytes_per_parameter", "pair_flops")
OF_DEVICE = ("flops", "bandwidth", "efficiency", "fixed", "host_bandwidth")


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
        check_parts(values)
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
    if unknown := sorted(set(parts) - {*ALL_HANDS, *OF_DEVICE}):
        known = ", ".join(sorted({"model", "weights_dtype", *ALL_HANDS, *OF_DEVICE}))
        raise ConfigError(f"cost model: {unknown} is unknown; known are {known}")
    values = {name: _positive(name, value) for name, value in parts.items()}
    device = _device(gpu, values)
    chosen = named or model
    if chosen is None:
        return _by_hand(gpu_name, device, values, dtype, kv_format, block_size)
    if both := [name for name in ALL_HANDS if name in values]:
        raise ConfigError(
            f"cost gives {', '.join(both)} beside the model {shown(str(chosen))}: allowed is one of them"
        )
    served = served_model(chosen, dtype)
    cost = CostModel(
        fixed=device["fixed"],
        per_token=served.token_flops / device["flops"],
        per_pair=served.pair_flops(windowed=False) / device["flops"],
        weights=served.common_bytes / device["bandwidth"],
        experts=served.expert_bytes / device["bandwidth"],
        expert_share=served.expert_share,
        per_context_token=served.read_bytes(kv_format, windowed=False) / device["bandwidth"],
        window=served.window,
        per_window_pair=served.pair_flops(windowed=True) / device["flops"],
        per_window_token=served.read_bytes(kv_format, windowed=True) / device["bandwidth"],
        per_swapped_block=served.block_bytes(block_size, kv_format) / device["host_bandwidth"],
        overlaps=True,
    )
    return StepCost(cost, served, is_roofline=True)


def _device(gpu: Gpu, values: dict[str, float]) -> dict[str, float]:
    """What the device reaches: flops and bandwidth, the fixed time and the host's bandwidth."""
    flops = values.get("flops", gpu.flops_per_second)
    if flops is None:
        raise ConfigError(f"flops of {gpu.name} are not known: give flops=")
    efficiency = values.get("efficiency", EFFICIENCY)
    if efficiency > 1:
        raise ConfigError(f"efficiency is {efficiency:g}: allowed is above 0 and at most 1")
    return {
        "flops": flops * efficiency,
        "bandwidth": values.get("bandwidth", gpu.bandwidth_bytes_per_second) * efficiency,
        "fixed": values.get("fixed", STEP_SECONDS),
        "host_bandwidth": values.get("host_bandwidth", HOST_BANDWIDTH),
    }


def _by_hand(
    gpu_name: str,
    device: dict[str, float],
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
    read = values["kv_bytes"] * kv_format.row_bytes(USUAL_HEAD_DIM) / (2 * USUAL_HEAD_DIM)
    parameters = values["parameters"]
    cost = CostModel(
        fixed=device["fixed"],
        per_token=2 * parameters / device["flops"],
        per_pair=values.get("pair_flops", 0.0) / device["flops"],
        weights=parameters * values.get("bytes_per_parameter", 2.0) / device["bandwidth"],
        per_context_token=read / device["bandwidth"],
        per_swapped_block=block_size * read / device["host_bandwidth"],
        overlaps=True,
    )
    return StepCost(cost, None, values["kv_bytes"], is_roofline=True, assumed=assumed)


MOST = {"flops": 1e20, "bandwidth": 1e18, "host_bandwidth": 1e18, "parameters": 1e15, "kv_bytes": 1e12}
MOST |= {"bytes_per_parameter": 64.0, "pair_flops": 1e15, "efficiency": 1.0, "fixed": 3600.0}


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {shown(text)}: allowed is a number") from None


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if not 0 < value <= MOST[name]:
        raise ConfigError(f"{name} is {text}: allowed is above 0 and at most {MOST[name]:g}")
    return value
