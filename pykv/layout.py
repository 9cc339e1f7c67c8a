"""The one formula for the size of a model's KV cache, layer by layer, read from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass

from pykv.errors import ConfigError
from pykv.field_checks import shown
from pykv.kv_format import ElementType
from pykv.kv_layer import CacheType, Config, KvLayer, Storage
from pykv.models.kv_fields import read_layers

__all__ = ["CacheType", "Config", "ElementType", "KvLayer", "KvLayout", "Storage"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layers of a model's KV cache and what they cost. Planner, allocator and metrics all use it.

    Attributes:
        layers: one entry an attention layer, in the model's order.
        storage: "expanded": keys and values as attention reads them; "latent": multi-head latent attention
            stores one latent a token instead.
    """

    layers: tuple[KvLayer, ...]
    storage: Storage = "expanded"

    @classmethod
    def from_config(cls, config: Config, *, storage: Storage = "expanded") -> KvLayout:
        """Reads the layout from a config object of transformers, or from the mapping in a config.json.

        Args:
            config: never changed; a multimodal config counts as its text part.
            storage: "latent" is for multi-head latent attention; other models have the same layout in both.

        Raises:
            UnsupportedModelError: a layer is of a kind that keeps something else than keys and values, or a
                field that the formula needs is missing.
        """
        if storage not in ("expanded", "latent"):
            raise ConfigError(f"storage is {shown(storage)}: allowed are 'expanded' and 'latent'")
        return cls(read_layers(config, storage), storage)

    @property
    def num_layers(self) -> int:
        """The number of attention layers, those that read another's keys and values included."""
        return len(self.layers)

    @property
    def elements_per_token(self) -> int:
        """The elements of one token's keys and values in all layers."""
        return sum(layer.elements_per_token for layer in self.layers)

    def bytes_per_token(self, dtype: CacheType) -> int:
        """The bytes of one token's keys and values in all layers, scales included.

        Raises:
            ConfigError: here and in the methods below: no format has the name `dtype`.
        """
        return sum(layer.bytes_per_token(dtype) for layer in self.layers)

    def growing_bytes_per_token(self, dtype: CacheType) -> int:
        """The bytes that one more token of a long sequence adds where windows give back what left them."""
        return sum(layer.bytes_per_token(dtype) for layer in self.layers if layer.window is None)

    def window_bytes(self, dtype: CacheType) -> int:
        """The most that layers with a window hold of one sequence where they give back what left it."""
        windowed = (
            layer.bytes_per_token(dtype) * layer.window for layer in self.layers if layer.window is not None
        )
        return sum(windowed)

    def uniform_bytes(self, num_tokens: int, dtype: CacheType) -> int:
        """The bytes of one sequence where every layer keeps every token: one block table for all layers."""
        return num_tokens * self.bytes_per_token(dtype)

    def capped_bytes(self, num_tokens: int, dtype: CacheType) -> int:
        """The bytes of one sequence where the layers with a window keep no more than it."""
        kept = (
            layer.bytes_per_token(dtype)
            * min(num_tokens, num_tokens if layer.window is None else layer.window)
            for layer in self.layers
        )
        return sum(kept)

    def block_bytes(self, block_size: int, dtype: CacheType) -> int:
        """The bytes of one block of `block_size` tokens, in all layers."""
        return block_size * self.bytes_per_token(dtype)
