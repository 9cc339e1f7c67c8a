"""The bytes that requests take, by their tokens: of keys and values alone, and in the blocks of a pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pykv.kv_format import KvFormat
from pykv.layout import KvLayer, KvLayout
from pykv.planner.formats import scale_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Footprint", "LayerGroup", "kv_bytes", "layer_groups"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind.

    Attributes:
        kind: "full", "window", "latent" or "shared" (its layers read earlier ones' keys and values).
        num_layers, num_kv_heads, head_dim_k, head_dim_v, window: as in `KvLayer`.
        kv_bytes_per_token, kv_scale_bytes_per_token: of all its layers.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    kv_bytes_per_token: int
    kv_scale_bytes_per_token: int

    @property
    def stored_bytes_per_token(self) -> int:
        """Keys, values and scales."""
        return self.kv_bytes_per_token + self.kv_scale_bytes_per_token


def layer_groups(layout: KvLayout, kv_format: KvFormat) -> tuple[LayerGroup, ...]:
    """The layers of a layout, those of one kind together, in the order in which the kinds come first."""
    counted = Counter(
        (_kind(layer, layout), layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v, layer.window)
        for layer in layout.layers
    )
    return tuple(_group(*shape, num_layers, kv_format) for shape, num_layers in counted.items())


def _kind(layer: KvLayer, layout: KvLayout) -> str:
    if layer.reads_layer is not None:
        return "shared"
    if layer.head_dim_v == 0 and layout.storage == "latent":
        return "latent"
    return "full" if layer.window is None else "window"


def _group(
    kind: str, heads: int, dim_k: int, dim_v: int, window: int | None, num_layers: int, kv_format: KvFormat
) -> LayerGroup:
    rows = [] if kind == "shared" else [size for size in (dim_k, dim_v) if size]
    scales = num_layers * heads * len(rows) * scale_bytes(kv_format)
    num_bytes = num_layers * heads * sum(kv_format.row_bytes(size) for size in rows)
    return LayerGroup(kind, num_layers, heads, dim_k, dim_v, window, num_bytes - scales, scales)


def kv_bytes(groups: tuple[LayerGroup, ...], num_tokens: int, state_bytes: int = 0) -> int:
    """The keys and values of one sequence, where layers with a window keep no more than it; without scales.

    Exact in tokens: blocks round it up.
    """
    kept = (
        group.kv_bytes_per_token * (num_tokens if group.window is None else min(num_tokens, group.window))
        for group in groups
    )
    return state_bytes + sum(kept)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What requests take in one rank's pool.

    Attributes:
        groups: the layers that the pool stores.
        block_size: tokens a block.
        windows_give_back: whether layers with a window keep the blocks of their window alone; else they keep all.
        state_bytes: of the layers that keep a state, for one sequence.
        num_tables: block tables of a sequence: a block of the pool holds the layers of one of them.
        prefill_tokens: tokens of a prompt that a step computes; 0: what windows hold more then is left out.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    windows_give_back: bool
    state_bytes: int = 0
    num_tables: int = 1
    prefill_tokens: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers: keys, values and scales."""
        return sum(group.stored_bytes_per_token for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Of one block of the pool: of all layers, or of those that share a table."""
        return self.block_size * self.bytes_per_token // self.num_tables

    def prefill_bytes(self, num_tokens: int) -> int:
        """What windows hold of a request, while its prompt is computed, more than later."""
        blocks = -(-num_tokens // self.block_size)
        extra = 0
        for group in self.groups:
            if self._gives_back(group) and self.prefill_tokens:
                most = -(
                    -((group.window or 1) - 1 + self.prefill_tokens + self.block_size - 1) // self.block_size
                )
                held = min(blocks, self._window_blocks(group))
                extra += (min(blocks, most) - held) * self.block_size * group.stored_bytes_per_token
        return extra

    def request_bytes(self, num_tokens: int) -> int:
        """Of one request that shares nothing."""
        return int(self.own_bytes(np.array([num_tokens], np.int64))[0])

    def shared_bytes(self, shared_prefix: int) -> int:
        """Of the blocks that hold a prefix that requests share, once for all of them; only full blocks are shared."""
        return shared_prefix // self.block_size * self.block_size * self._growing_bytes_per_token

    def own_bytes(self, num_tokens: NDArray[np.int64], shared_prefix: int = 0) -> NDArray[np.int64]:
        """Of requests' own blocks, beside those of the prefix that they share.

        The last token is always a request's own, since its logits are wanted. Windows and states are not shared: what
        they keep is a request's last tokens.

        Args:
            num_tokens: int64 [n], of each request in all, at least 1.
            shared_prefix: tokens of the prefix.

        Returns:
            int64 [n].
        """
        blocks = -(-num_tokens // self.block_size)
        shared = np.minimum(shared_prefix // self.block_size, (num_tokens - 1) // self.block_size)
        own = (blocks - shared) * (self.block_size * self._growing_bytes_per_token)
        for group in self.groups:
            if self._gives_back(group):
                own = own + np.minimum(blocks, self._window_blocks(group)) * (
                    self.block_size * group.stored_bytes_per_token
                )
        total: NDArray[np.int64] = own + self.state_bytes
        return total

    @property
    def _growing_bytes_per_token(self) -> int:
        return sum(group.stored_bytes_per_token for group in self.groups if not self._gives_back(group))

    def _gives_back(self, group: LayerGroup) -> bool:
        return self.windows_give_back and group.window is not None

    def _window_blocks(self, group: LayerGroup) -> int:
        """A window that does not begin at a block's border touches one block more."""
        return -(-((group.window or 1) - 1) // self.block_size) + 1
