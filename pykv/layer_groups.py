"""Which layers of a model share a block table, those that keep the same positions; and which keep a state instead."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pykv.errors import ConfigError
from pykv.field_checks import as_integer, one_of, refuse
from pykv.layout import CacheType, KvLayer, KvLayout

__all__ = ["LayerGroups", "StateGroup", "StateTensor"]

MAX_PADDING = 0.05
"""The share of a block that may stand empty so that a model has fewer groups."""
MAX_GROUPS = 64
LARGEST_SIZE = 2**30
STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes of states, by their names in torch, and the bytes of an element."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model in groups of one size, so that a block is the same bytes in each group.

    A group of fewer layers than the others leaves the rest of its blocks empty. Layers that store rows of different
    sizes are kept in one group of all positions.

    Attributes:
        windows: of each group: the positions that its layers keep, as `SchedulerConfig.groups` takes them.
        num_storages: layers of a group; the KV pool has memory for so many layers.
        group_of, storage_of: for each layer of the layout: its group, and which of the pool's memories holds its keys
            and values. A layer that reads another's has that one's.
    """

    windows: tuple[int | None, ...]
    num_storages: int
    group_of: tuple[int, ...]
    storage_of: tuple[int, ...]

    @classmethod
    def of(cls, layout: KvLayout) -> LayerGroups:
        """Groups the layers of a layout by their windows."""
        own = [index for index, layer in enumerate(layout.layers) if layer.reads_layer is None]
        windows = [layout.layers[index].window for index in own]
        if len({_shape(layout.layers[index]) for index in own}) > 1 or set(windows) == {None}:
            return cls.together(layout)
        counts = Counter(windows)
        size = _group_size(tuple(counts.values()))
        if sum(-(-count // size) for count in counts.values()) > MAX_GROUPS:
            return cls.together(layout)
        return _grouped(layout, own, size)

    @classmethod
    def together(cls, layout: KvLayout) -> LayerGroups:
        """One group that keeps all positions of every layer."""
        own = [index for index, layer in enumerate(layout.layers) if layer.reads_layer is None]
        storages = {index: place for place, index in enumerate(own)}
        storage_of = tuple(storages[_source(layout, index)] for index in range(layout.num_layers))
        return cls((None,), len(own), (0,) * layout.num_layers, storage_of)

    def block_bytes(self, layout: KvLayout, block_size: int, dtype: CacheType) -> int:
        """The bytes of one block of `block_size` tokens in the layers of one group, scales included."""
        if len(self.windows) == 1:
            return layout.block_bytes(block_size, dtype)
        layer = next(layer for layer in layout.layers if layer.reads_layer is None)
        return self.num_storages * block_size * layer.bytes_per_token(dtype)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state: a recurrent state, or the last inputs of a convolution.

    Attributes:
        shape: of one sequence's, every size at least 1.
        dtype: a key of `STATE_DTYPES`.

    Raises:
        ConfigError: a size is below 1, or the dtype is none of these.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or not self.shape:
            refuse("shape of a state", self.shape, "a tuple of one size or more", ConfigError)
        sizes = (as_integer("shape of a state", size, 1, LARGEST_SIZE, ConfigError) for size in self.shape)
        object.__setattr__(self, "shape", tuple(sizes))
        one_of("dtype of a state", self.dtype, tuple(STATE_DTYPES))

    @property
    def nbytes(self) -> int:
        """The bytes of one sequence's."""
        return STATE_DTYPES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers that keep a state of fixed size for each sequence: linear attention, SSM, short convolutions.

    They advance together, so one slot of `pykv.StatePool` holds the states of all of them.

    Attributes:
        layers: for each such layer, in the model's order, the tensors that it keeps.
    """

    layers: tuple[tuple[StateTensor, ...], ...]

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot: of one sequence's states, or of one checkpoint."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def _grouped(layout: KvLayout, own: list[int], size: int) -> LayerGroups:
    windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    open_groups: dict[int | None, tuple[int, int]] = {}
    for index in own:
        window = layout.layers[index].window
        group, filled = open_groups.get(window, (-1, size))
        if filled == size:
            group, filled = len(windows), 0
            windows.append(window)
        places[index] = (group, filled)
        open_groups[window] = (group, filled + 1)
    of_layers = [places[_source(layout, index)] for index in range(layout.num_layers)]
    return LayerGroups(
        tuple(windows),
        size,
        tuple(group for group, _ in of_layers),
        tuple(storage for _, storage in of_layers),
    )


def _source(layout: KvLayout, index: int) -> int:
    """The layer that stores what a layer reads."""
    source = layout.layers[index].reads_layer
    return index if source is None else _source(layout, source)


def _shape(layer: KvLayer) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v


def _group_size(counts: tuple[int, ...]) -> int:
    """The most layers a group that leave little of the blocks empty; those that divide all counts leave nothing."""
    least = math.gcd(*counts)
    fitting = [size for size in range(least, max(counts) + 1) if _padding(counts, size) <= MAX_PADDING]
    return max(fitting, default=least)


def _padding(counts: tuple[int, ...], size: int) -> float:
    blocks = sum(-(-count // size) for count in counts)
    return blocks * size / sum(counts) - 1
