"""Copies of the kernels' package with one text changed, imported under a name of their own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pykv.kernels

SOURCE = Path(pykv.kernels.__file__).parent


class MutantKernels:
    """One copy; its modules are attributes: `mutant.decode`, `mutant.attend`, …"""

    def __init__(self, folder: Path, name: str, file: str, original: str, changed: str) -> None:
        self._name = name
        package = folder / name
        package.mkdir()
        for path in SOURCE.glob("*.py"):
            text = path.read_text()
            if path.name == file:
                if text.count(original) != 1:
                    raise ValueError(f"{file} holds {original!r} {text.count(original)} times, not once")
                text = text.replace(original, changed)
            if path.name != "operators.py":  # torch knows each operator once
                (package / path.name).write_text(text.replace("pykv.kernels", name))
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))

    def __getattr__(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self._name}.{module}")
