"""A model as a replay sees it: what its cache stores, and what a step of it computes and reads.

All of it is what `pykv plan` knows of the model, so that a plan and a replay speak of the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.kv_format import KvFormat
from pykv.layer_groups import LayerGroups
from pykv.layout import KvLayer, KvLayout
from pykv.planner.formats import WEIGHT_BITS
from pykv.planner.model_facts import ModelFacts, read_model
from pykv.planner.options import read_options

__all__ = ["ServedModel", "served_model"]

KEPT_BITS = 16
"""Of embeddings where the other weights take fewer."""


@dataclass(frozen=True)
class ServedModel:
    """A model that pykv's pool stores.

    Attributes:
        facts: what the planner knows of it.
        layout: its attention layers, as the pool stores them.
    """

    facts: ModelFacts
    layout: KvLayout

    @property
    def name(self) -> str:
        """For messages and reports."""
        return self.facts.name

    @cached_property
    def groups(self) -> LayerGroups:
        """The layers that share a block table; a replay's scheduler has the same."""
        return LayerGroups.of(self.layout)

    @property
    def has_windows(self) -> bool:
        """Whether layers give back what left their window."""
        return self.groups.windows != (None,)

    def block_bytes(self, block_size: int, of: KvFormat) -> int:
        """The bytes of one block of the pool, scales included."""
        return self.groups.block_bytes(self.layout, block_size, of)

    @cached_property
    def window(self) -> int:
        """Tokens that layers with a window see; 0: no layer gives anything back.

        Raises:
            ConfigError: its layers have windows of several sizes, which a cost model does not tell apart.
        """
        windows = {window for window in self.groups.windows if window is not None}
        if len(windows) > 1:
            sizes = ", ".join(map(str, sorted(windows)))
            raise ConfigError(
                f"model is {shown(self.name)}, whose layers have windows of {sizes} tokens: "
                "a roofline is made for one size of window; give a measured or a linear cost"
            )
        return windows.pop() if windows else 0

    def read_bytes(self, of: KvFormat, *, windowed: bool) -> int:
        """What attention reads of one token's keys and values, scales included.

        Args:
            of: how they are stored.
            windowed: in the layers with a window; else in those without.
        """
        return sum(layer.bytes_per_token(of) for layer in self._read_layers(windowed=windowed))

    def pair_flops(self, *, windowed: bool) -> int:
        """What one query costs for one token that it attends to, in the layers with a window or in those without: a
        product and a sum for each element of the keys, and of the values, in each query head."""
        assert self.facts.num_heads is not None
        layers = self._read_layers(windowed=windowed)
        return sum(2 * self.facts.num_heads * (layer.head_dim_k + layer.head_dim_v) for layer in layers)

    @property
    def token_flops(self) -> float:
        """What one token costs in all matrix products: two for each parameter that it passes."""
        parameters = float(self._num_parameters - self.facts.input_embedding)
        if self._experts is not None:
            experts, share = self._experts
            parameters -= experts * (1 - share)
        return 2 * parameters

    @property
    def expert_share(self) -> float:
        """The share of the experts that one token is sent to; 0: there are none."""
        return 0.0 if self._experts is None else self._experts[1]

    @property
    def expert_bytes(self) -> int:
        """Of all experts."""
        return 0 if self._experts is None else int(self._experts[0] * self._bits / 8)

    @property
    def common_bytes(self) -> int:
        """The weights that every step reads: all but the experts and the input's embedding."""
        assert self.facts.weights is not None
        embedding = int(self.facts.input_embedding * max(self._bits, Fraction(KEPT_BITS)) / 8)
        return max(0, self.facts.weights.num_bytes - self.expert_bytes - embedding)

    @property
    def weights_dtype(self) -> str:
        """The name of the weights' dtype."""
        assert self.facts.weights is not None
        return self.facts.weights.dtype

    @property
    def _num_parameters(self) -> int:
        assert self.facts.num_parameters is not None
        return self.facts.num_parameters

    @property
    def _experts(self) -> tuple[int, float] | None:
        experts = self.facts.experts
        if experts is None:
            return None
        assert experts.used is not None
        return experts.parameters, experts.used / experts.num

    @property
    def _bits(self) -> Fraction:
        assert self.facts.weights is not None
        return WEIGHT_BITS[self.facts.weights.dtype]

    def _read_layers(self, *, windowed: bool) -> list[KvLayer]:
        """For each layer of a kind the one that stores what it reads, which may be another."""
        layers = []
        for layer in self.layout.layers:
            read = layer
            while read.reads_layer is not None:
                read = self.layout.layers[read.reads_layer]
            if (self.has_windows and layer.window is not None) == windowed:
                layers.append(read)
        return layers


def served_model(model: str | os.PathLike[str], weights_dtype: str | None = None) -> ServedModel:
    """Reads a model as `pykv plan` does.

    Args:
        model: a folder, a config.json, or a known name.
        weights_dtype: None: as it is published.

    Raises:
        ConfigError: the model is unknown, or a replay cannot represent it: the message says why.
        ModelError: its files cannot be read.
    """
    facts = read_model(read_options({"model": model, "weights_dtype": weights_dtype}))
    if facts.engine is None:
        raise ConfigError(
            f"model is {shown(str(model))}, which a replay cannot represent, as pykv does not serve it: "
            f"{facts.engine_refusal}"
        )
    missing = {
        "num_heads": facts.num_heads is None,
        "num_parameters": facts.num_parameters is None,
        "weights": facts.weights is None or facts.weights.dtype not in WEIGHT_BITS,
        "num_experts_per_tok": facts.experts is not None and facts.experts.used is None,
    }
    if unknown := [name for name, is_missing in missing.items() if is_missing]:
        raise ConfigError(
            f"model is {shown(str(model))}, whose config does not tell its {' and '.join(unknown)}"
        )
    return ServedModel(facts, facts.engine.model_layout)
