"""Configs, parameters and outputs can be had without the heavy dependencies."""

from __future__ import annotations

import subprocess
import sys

LIGHT = "pykv.engine, pykv.engine.config, pykv.engine.outputs, pykv.engine.merging, pykv.sampling"


def test_light_modules_import_neither_torch_nor_transformers():
    code = f"import sys, {LIGHT}; print({{'torch', 'transformers', 'tokenizers'}} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"


def test_the_public_names_are_there():
    import pykv.engine

    assert pykv.engine.__all__
    for name in pykv.engine.__all__:
        assert getattr(pykv.engine, name).__name__ == name
