"""What pykv's own pool stores of a model. Where this is more than the formula, the planner's promises are about this.

Latent attention is stored as attention reads it, expanded to the keys and values of every head; and all layers share
one block table, so those with a window keep every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv.layout import KvLayout

__all__ = ["WINDOWS_GIVE_BACK", "stored_layout"]

WINDOWS_GIVE_BACK = False
"""Whether layers with a window give back the blocks that left it."""


def stored_layout(config: Mapping[str, Any]) -> KvLayout:
    """The layout of the engine's pool for the model that a config describes.

    Raises:
        UnsupportedModelError: the engine does not serve such layers.
    """
    return KvLayout.from_config(config)
