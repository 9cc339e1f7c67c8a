"""The shipped tables: public models and GPUs, found by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.near_names import near

__all__ = ["Gpu", "gpu_names", "gpu_table", "known_model", "model_names"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as in the table.
        memory_bytes: the memory that its driver reports, in bytes.
        bandwidth_bytes_per_second: of that memory, by the data sheet.
        flops_per_second: dense matrix products in 16 bit, by the data sheet; None: not in the table.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: int
    flops_per_second: int | None


def model_names() -> list[str]:
    """The names of the models in the shipped table."""
    return list(_table("models"))


def gpu_names() -> list[str]:
    """The names of the GPUs in the shipped table."""
    return list(_table("gpus"))


def known_model(name: str) -> tuple[str, Mapping[str, Any]]:
    """A model of the shipped table, by its name with or without the owner, in any case.

    Returns:
        Its full name and its entry: `config` (what its config.json says), `num_parameters`, and where it is published
        in another dtype than bfloat16 `weights_dtype` and perhaps `weights_bytes`.

    Raises:
        ConfigError: the table has no such model; near names are in the message.
    """
    table = _table("models")
    wanted = _plain(name)
    found = [known for known in table if wanted in (_plain(known), _plain(known.partition("/")[2]))]
    if found:
        exact = [known for known in found if known.casefold().endswith(name.casefold())]
        chosen = (exact or found)[0]
        return chosen, table[chosen]
    also = near(name.rpartition("/")[2], [known.partition("/")[2] for known in table])
    hint = f"near ones: {', '.join(also)}; " if also else ""
    raise ConfigError(
        f"model is {shown(name)}, which is neither a folder, nor a file, nor one of the {len(table)} known names; "
        f"{hint}`pykv plan --list models` shows all"
    )


def gpu_table(name: str) -> Gpu:
    """A GPU of the shipped table, by its name or a shorter one, in any case.

    Raises:
        ConfigError: the table has no such GPU; near names are in the message.
    """
    names = {_plain(name): name for name in _table("gpus")}
    aliases = {_plain(alias): full for full, entry in _table("gpus").items() for alias in entry["aliases"]}
    full = (aliases | names).get(_plain(name))
    if full is None:
        also = near(name, _table("gpus"))
        hint = f"near ones: {', '.join(also)}; " if also else ""
        raise ConfigError(
            f"gpu is {shown(name)}, which is not known; {hint}`pykv plan --list gpus` shows all, or give memory"
        )
    entry = _table("gpus")[full]
    return Gpu(
        full, *(entry[name] for name in ("memory_bytes", "bandwidth_bytes_per_second", "flops_per_second"))
    )


@cache
def _table(name: str) -> Mapping[str, Any]:
    text = (files("pykv.planner") / "data" / f"{name}.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def _plain(name: str) -> str:
    """Letters and digits alone, without what does not change the sizes: who published it, tuned for what."""
    lowered = re.sub(r"-(instruct|chat|base|it|hf|sft|bf16)(-\d{4})?$", "", name.lower())
    return re.sub(r"[^a-z0-9/]", "", lowered).removeprefix("metallama/").removeprefix("meta")
