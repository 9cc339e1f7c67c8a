"""What a model's name means: the bundled model, a folder, a GGUF file or a name on the model hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pykv.errors import ModelError
from pykv.models.bundled import BUNDLED_NAME, BUNDLED_SHA256, bundled_gguf
from pykv.models.cache_folder import file_sha256
from pykv.models.conversion import converted_folder
from pykv.models.names import BUNDLED, check_name, local_path

__all__ = ["BUNDLED", "Checkpoint", "find_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the files of a model are.

    Attributes:
        location: a local folder, or a name on the model hub, OWNER/NAME.
        name: what to call the model.
        is_local: whether it is read from this machine alone, and no hub is asked.
        hub_problem: why the hub was not asked for what is read from its cache, which may have a part of it alone;
            None = it is not read from the cache, or the hub was asked.
    """

    location: str
    name: str
    is_local: bool
    hub_problem: str | None = None


def find_checkpoint(source: str | Path, progress: Callable[[str], None]) -> Checkpoint:
    """Finds the files; those of a GGUF file are converted first, once.

    Raises:
        ModelError: nothing is there, or what is there is no model.
    """
    if source == BUNDLED:
        folder = converted_folder(bundled_gguf(), BUNDLED_SHA256, progress)
        return Checkpoint(str(folder), BUNDLED_NAME, is_local=True)
    check_name(source)
    path = local_path(source)
    if os.path.isdir(path):
        return _folder(path)
    if os.path.isfile(path):
        return _file(path, progress)
    return Checkpoint(str(source), str(source), is_local=False)


def _folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise ModelError(f"the folder {path} holds no model: it has no config.json")
    return Checkpoint(str(path), path.resolve().name, is_local=True)


def _file(path: Path, progress: Callable[[str], None]) -> Checkpoint:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is no model: it is neither a folder nor a GGUF file")
    return Checkpoint(str(converted_folder(path, file_sha256(path), progress)), path.stem, is_local=True)
