"""The bytes of a model's weights: of its files, or its parameters times what one takes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pykv.errors import ModelError
from pykv.planner.formats import WEIGHT_BITS
from pykv.planner.parameters import Parameters

__all__ = ["Weights", "bytes_of_files", "bytes_of_parameters"]

SIXTEEN_BITS = 16


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model's weights take.

    Attributes:
        num_bytes: in all.
        dtype: the name of their dtype.
        source: where the figure is from, in words.
        num_kept: parameters that stay in 16 bits when the others take fewer.
    """

    num_bytes: int
    dtype: str
    source: str
    num_kept: int = 0


def bytes_of_parameters(parameters: Parameters, dtype: str) -> int:
    """The bytes of so many parameters. Below 16 bits, embedding and output stay in 16, as published models have it."""
    bits = WEIGHT_BITS[dtype]
    kept = parameters.embedding if bits < SIXTEEN_BITS else 0
    return math.ceil(((parameters.total - kept) * bits + kept * SIXTEEN_BITS) / 8)


def bytes_of_files(folder: Path) -> int | None:
    """The bytes of the tensors in a model's folder; None: it holds no weights.

    Raises:
        ModelError: the index of the files, or the head of one, cannot be read.
    """
    safetensors = _indexed_files(folder) or sorted(folder.glob("model*.safetensors"))
    if safetensors:
        return sum(_tensor_bytes(path) for path in safetensors)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in pickled) if pickled else None


def _indexed_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weights: {error}") from error
    paths = [folder / name for name in sorted(names)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ModelError(f"{index} names {missing[0].name}, which is not there")
    return paths


def _tensor_bytes(path: Path) -> int:
    """A safetensors file without its head: eight bytes with the head's length, then the head."""
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
    size = path.stat().st_size - 8 - head
    if size < 0:
        raise ModelError(f"{path} is no safetensors file: its head would be {head} bytes long")
    return size
