"""Turns a GGUF file into a folder that loads a hundred times faster, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from pykv.errors import ModelError
from pykv.models.cache_folder import cache_dir, made_once
from pykv.models.quiet import offline, quiet, without_gguf_bar
from pykv.models.timed_step import timed_step

__all__ = ["converted_folder"]

# What the files of a conversion look like; a change here makes new folders.
FORMAT = 1


def converted_folder(gguf: Path, sha256: str, progress: Callable[[str], None]) -> Path:
    """The folder of safetensors, config and tokenizer that `gguf` holds; converted at the first call.

    The weights are unpacked and rounded to bfloat16: the blocks of a GGUF file are coarser than that.

    Args:
        sha256: of the file; it names the folder.

    Raises:
        ModelError: the file cannot be read as a model, or the cache cannot be written.
    """

    def convert(folder: Path) -> None:
        with timed_step(progress, f"converting {gguf.name}", "once, which takes about half a minute"):
            _convert(gguf, folder)

    return made_once(cache_dir() / "models" / f"{gguf.stem}-{sha256[:16]}-{FORMAT}", convert)


def _convert(gguf: Path, folder: Path) -> None:
    place = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with quiet(), without_gguf_bar(), offline():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.bfloat16, **place, **_unpacked()
            )
            _forget_quantization(model)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{gguf} cannot be read as a GGUF model: {error}") from error


def _unpacked() -> dict[str, Any]:
    """Asks for plain weights, where transformers would keep them in their quantized blocks."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _forget_quantization(model: Any) -> None:
    """The weights are plain now, but a model that remembers where they came from refuses to be saved."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
