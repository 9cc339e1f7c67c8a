"""The tensors that hold all sequences' keys and values, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from pykv.attention import copy_blocks
from pykv.errors import ConfigError
from pykv.host_memory import anonymous_memory, available_bytes
from pykv.layout import KvLayer, KvLayout

__all__ = ["KvPool"]

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KvPool:
    """The paged KV cache of one model on one device: the bytes. Which block is whose, the scheduler knows.

    One layer's memory, where each block's keys and values are neighbours:

        # block 0                                    block 1
        # [head 0 slots .. head h slots | the same of values] [...
        #  key_caches[i][0]               value_caches[i][0]

    Attributes:
        layout, num_blocks, block_size, dtype, device: as given; block 0 counts and is never handed out.
        key_caches, value_caches: for each layer a strided view [num_blocks, num_kv_heads, block_size,
            head_dim_k or _v]. Layers that share keys and values have the same views.
        nbytes: the bytes of all blocks.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates the pool. On a CPU its pages are taken from the system when they are first written.

        Raises:
            ConfigError: a number is below 1, the dtype is none that a cache can have, or the device has fewer
                bytes left than the pool needs; nothing was allocated.
        """
        _check_counts(num_blocks, block_size)
        if layout.storage != "expanded":
            raise ConfigError(
                f"storage of the layout is {layout.storage!r}; the KV pool holds 'expanded' ones"
            )
        if dtype not in CACHE_DTYPES:
            allowed = ", ".join(map(str, CACHE_DTYPES))
            raise ConfigError(f"dtype of the KV pool is {dtype}; allowed are {allowed}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.nbytes = num_blocks * layout.block_bytes(block_size, dtype)
        self._check_memory()
        self.key_caches, self.value_caches = self._allocate()

    def copy_blocks(self, pairs: Tensor, backend: str = "auto") -> None:
        """Copies whole blocks in all layers.

        Args:
            pairs: int64 [num_pairs, 2], (source block, target block); targets differ and none is a source.
            backend: as in `pykv.copy_blocks`.

        Raises:
            TypeError, ValueError: see `pykv.copy_blocks`; nothing was copied.
        """
        own = [index for index, layer in enumerate(self.layout.layers) if layer.reads_layer is None]
        keys, values = [self.key_caches[i] for i in own], [self.value_caches[i] for i in own]
        copy_blocks(keys, values, pairs, backend=backend)

    def _check_memory(self) -> None:
        """Fails before anything is allocated: a process that is killed later cannot say why."""
        available = _available_bytes(self.device)
        if available is not None and self.nbytes > available:
            fitting = available // (self.nbytes // self.num_blocks)
            raise ConfigError(
                f"num_blocks is {self.num_blocks}: the KV pool needs {self.nbytes} bytes, but {available} "
                f"bytes of {self.device.type} memory are available; at most {fitting} blocks fit"
            )

    def _allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        sizes = [self.num_blocks * self.block_size * layer.elements_per_token for layer in self.layout.layers]
        parts = torch.split(_allocated(sum(sizes), self.dtype, self.device), sizes)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer, part in zip(self.layout.layers, parts, strict=True):
            if layer.reads_layer is None:
                key, value = self._views(layer, part)
            else:
                key, value = keys[layer.reads_layer], values[layer.reads_layer]
            keys.append(key)
            values.append(value)
        return keys, values

    def _views(self, layer: KvLayer, part: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values: in each block first all heads' keys, then all heads' values."""
        by_block = part.view(self.num_blocks, self.block_size * layer.elements_per_token)
        num_key_elements = layer.num_kv_heads * self.block_size * layer.head_dim_k
        keys, values = by_block.tensor_split((num_key_elements,), dim=1)
        shape = (self.num_blocks, layer.num_kv_heads, self.block_size)
        return keys.view(*shape, layer.head_dim_k), values.view(*shape, layer.head_dim_v)


def _allocated(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(num_elements, dtype=dtype, device=device)
    return torch.frombuffer(anonymous_memory(num_elements * dtype.itemsize), dtype=dtype, count=num_elements)


def _available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() if device.type == "cpu" else None


def _check_counts(num_blocks: int, block_size: int) -> None:
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; a whole number of 1 or more is needed")
