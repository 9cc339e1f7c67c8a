"""Keeps transformers from drawing bars and from talking to a hub while a model is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

__all__ = ["offline", "quiet", "without_gguf_bar"]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers in here; errors are still logged."""
    logging: Any = transformers_logging  # its functions have no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def without_gguf_bar() -> Iterator[None]:
    """No progress bar while a GGUF file is read, which transformers draws whatever its logging is told."""
    module: Any = modeling_gguf_pytorch_utils
    before, module.tqdm = module.tqdm, lambda tensors, **options: tensors
    try:
        yield
    finally:
        module.tqdm = before


@contextmanager
def offline() -> Iterator[None]:
    """No access to the model hub in here, whatever the environment says."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
