"""What pykv's own pool stores of a model. Where this is more than the formula, the planner's promises are about this.

Latent attention is stored as attention reads it, expanded to the keys and values of every head. Layers with a window
give back what left it; groups of fewer layers than the others leave a part of their blocks empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykv.layer_groups import LayerGroups
from pykv.layout import KvLayer, KvLayout

__all__ = ["EngineStorage"]

PREFILL_TOKENS = 2048
"""Tokens that a step of the engine computes by default: what a window's table holds more while a prompt is computed."""


@dataclass(frozen=True, slots=True)
class EngineStorage:
    """How the engine's pool stores a model.

    Attributes:
        model_layout: the model's layers, as attention reads them.
    """

    model_layout: KvLayout

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> EngineStorage:
        """Reads the layers of the model that a config describes.

        Raises:
            UnsupportedModelError: the engine does not serve such layers.
        """
        return cls(KvLayout.from_config(config))

    @property
    def num_tables(self) -> int:
        """Layer groups: block tables of a sequence, and parts that the blocks of all layers are given out in."""
        return len(LayerGroups.of(self.model_layout).windows)

    @property
    def gives_back(self) -> bool:
        """Whether layers with a window give back the blocks that left it."""
        return LayerGroups.of(self.model_layout).windows != (None,)

    @property
    def layout(self) -> KvLayout:
        """The layers, with one more for each place of a group that stays empty."""
        groups = LayerGroups.of(self.model_layout)
        own = [index for index, layer in enumerate(self.model_layout.layers) if layer.reads_layer is None]
        filled = Counter(groups.group_of[index] for index in own)
        empty: list[KvLayer] = []
        if len(groups.windows) > 1:
            first = self.model_layout.layers[own[0]]
            for group, window in enumerate(groups.windows):
                layer = KvLayer(first.num_kv_heads, first.head_dim_k, first.head_dim_v, window)
                empty += [layer] * (groups.num_storages - filled[group])
        return KvLayout((*self.model_layout.layers, *empty), self.model_layout.storage)
