"""How long a step takes: a cost model, made by hand, from a device's roofline, or from a file that `pykv fit` wrote."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.layout import KvLayout
from pykv.planner.tables import gpu_table, known_model

__all__ = ["DEFAULT_COST", "FLOPS", "CostModel", "kv_of_cost"]

DEFAULT_COST = "roofline:H100,model=llama-3.1-8b"
"""In 16 bit, at 70 % of the data sheet."""

FLOPS = {
    "A10-24GB": 125e12,
    "A100-40GB": 312e12,
    "A100-80GB": 312e12,
    "A100-PCIe-80GB": 312e12,
    "B200-180GB": 2250e12,
    "H100-80GB": 989e12,
    "H100-NVL-94GB": 835e12,
    "H100-PCIe-80GB": 756e12,
    "H20-96GB": 148e12,
    "H200-141GB": 989e12,
    "L4-24GB": 121e12,
    "L40S-48GB": 362e12,
    "MI300X-192GB": 1307e12,
    "MI325X-256GB": 1307e12,
    "RTX-3090-24GB": 71e12,
    "RTX-4090-24GB": 165e12,
    "RTX-5090-32GB": 209e12,
}
"""Dense matrix products in 16 bit, a second, by the names of `pykv plan`. Source: the makers' data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: `fixed + sequences + swaps + (compute and memory)`.

    Attributes:
        fixed: of every step.
        per_sequence: of each sequence in the batch.
        per_token: compute, of each token.
        per_pair: compute, of each (token, token that it attends to).
        weights: memory, of reading the weights.
        per_context_token: memory, of each token whose keys and values are read.
        per_swapped_block: of each block that is copied to or from the host.
        overlaps: whether the larger of compute and memory counts, as in a roofline, or their sum.
    """

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    weights: float = 0.0
    per_context_token: float = 0.0
    per_swapped_block: float = 0.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        if type(self.overlaps) is not bool:
            raise ConfigError(f"overlaps is {self.overlaps!r}: allowed are true and false")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "overlaps":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
                raise ConfigError(f"{field.name} is {value!r}: allowed are seconds from 0 to 3600")
            object.__setattr__(self, field.name, float(value))

    @classmethod
    def roofline(
        cls,
        *,
        flops: float,
        bytes_per_second: float,
        num_parameters: float,
        kv_bytes_per_token: float,
        bytes_per_parameter: float = 2.0,
        efficiency: float = 0.7,
    ) -> CostModel:
        """The model of a device of which compute and memory reach a share of what its data sheet says.

        Args:
            flops: of dense matrix products, a second.
            bytes_per_second: read from its memory.
            num_parameters: of the model, those of them that a token uses.
            kv_bytes_per_token: `KvLayout.bytes_per_token`.
            bytes_per_parameter: 2 for 16 bit.
            efficiency: the share, above 0 and at most 1.

        Raises:
            ConfigError: a value is not allowed.
        """
        _check("flops", flops, 1e20)
        _check("bytes_per_second", bytes_per_second, 1e18)
        _check("num_parameters", num_parameters, 1e15)
        _check("kv_bytes_per_token", kv_bytes_per_token, 1e12)
        _check("bytes_per_parameter", bytes_per_parameter, 64)
        _check("efficiency", efficiency, 1)
        flops, bandwidth = flops * efficiency, bytes_per_second * efficiency
        return cls(
            fixed=5e-4,
            per_token=2 * num_parameters / flops,
            weights=num_parameters * bytes_per_parameter / bandwidth,
            per_context_token=kv_bytes_per_token / bandwidth,
            overlaps=True,
        )

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The model that a text names.

        Args:
            text: `constant:SECONDS`; `linear:FIELD=SECONDS,...`; `roofline:GPU,model=NAME`, both by the names of
                `pykv plan`, or in the place of the model `parameters=N,kv_bytes=N` (and `flops=`, `efficiency=`,
                `bytes_per_parameter=`); or the path of a JSON file.

        Raises:
            ConfigError: the text is none of these.
        """
        kind, separator, rest = text.partition(":")
        if separator and kind == "constant":
            return cls(fixed=_number("constant", rest))
        if separator and kind == "linear":
            values: dict[str, Any] = dict(_assignments(rest))
            _only(values, {field.name for field in fields(cls)} - {"overlaps"})
            return replace(cls(), **values)
        if separator and kind == "roofline":
            return cls.roofline(**_roofline(rest))
        if Path(text).is_file():
            return cls.load(text)
        raise ConfigError(
            f"cost is {text!r}: allowed are constant:SECONDS, linear:FIELD=SECONDS,..., roofline:GPU,..., or the "
            "path of a JSON file"
        )

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
        _only(values, {field.name for field in fields(cls)})
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


def kv_of_cost(text: str) -> KvLayout | float | None:
    """What a token's keys and values take, as a text for `CostModel.parse` says.

    Returns:
        The layers of the model that it names, latents as such; or `kv_bytes=`, bytes in 16 bit; None: it says neither.

    Raises:
        ConfigError: the model is unknown, or the bytes are no number.
    """
    kind, _, rest = text.partition(":")
    parts = dict(part.partition("=")[::2] for part in rest.split(",")[1:]) if kind == "roofline" else {}
    if "kv_bytes" in parts:
        return _number("kv_bytes", parts["kv_bytes"])
    return _layout_of(parts["model"]) if parts.get("model") else None


def _layout_of(name: str) -> KvLayout:
    _, entry = known_model(name)
    return KvLayout.from_config(entry["config"], storage="latent")


def _roofline(text: str) -> dict[str, float]:
    """What `GPU,model=NAME,...` says, as arguments of `CostModel.roofline`."""
    gpu_name, _, rest = text.partition(",")
    parts = dict(part.partition("=")[::2] for part in rest.split(",") if part)
    names = {"parameters": "num_parameters", "kv_bytes": "kv_bytes_per_token"}
    values = {"num_parameters": 8.03e9, "kv_bytes_per_token": 131_072.0}
    if model := parts.pop("model", None):
        values = _of_model(model)
    _only(parts, {"model", "flops", "efficiency", "bytes_per_parameter", *names})
    gpu = gpu_table(gpu_name)
    if "flops" not in parts and gpu.name not in FLOPS:
        raise ConfigError(
            f"flops of {gpu.name} are not known: give flops=; known are those of {', '.join(FLOPS)}"
        )
    given = {names.get(name, name): _number(name, value) for name, value in parts.items()}
    return {
        "flops": FLOPS.get(gpu.name, 0.0),
        "bytes_per_second": gpu.bandwidth_bytes_per_second,
        **values,
        **given,
    }


def _of_model(name: str) -> dict[str, float]:
    _, entry = known_model(name)
    return {
        "num_parameters": entry["num_parameters"],
        "kv_bytes_per_token": _layout_of(name).bytes_per_token("bfloat16"),
    }


def _assignments(text: str) -> dict[str, float]:
    parts = [part.partition("=") for part in text.split(",") if part]
    return {name.strip(): _number(name, value) for name, _, value in parts}


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: allowed is a number") from None


def _only(values: object, known: set[str]) -> None:
    if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
        found = unknown if isinstance(values, dict) else values
        raise ConfigError(f"cost model: {found} is unknown; known are {', '.join(sorted(known))}")


def _check(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{name} is {value}: allowed is above 0 and at most {most:g}")
