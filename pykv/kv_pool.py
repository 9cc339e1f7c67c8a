"""The tensors that hold all sequences' keys and values, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention import KvScales, copy_blocks
from pykv.attention.layer_cache import LayerCache
from pykv.attention.transfer import transfer_blocks
from pykv.errors import ConfigError, InvalidRequestError
from pykv.field_checks import as_boolean, as_integer, instance_of, refuse
from pykv.host_memory import anonymous_memory
from pykv.kv_format import BF16, CodecFormat, DtypeFormat, KvFormat, checked_row_bytes, kv_format_of
from pykv.layer_groups import LayerGroups
from pykv.layout import CacheType, KvLayer, KvLayout
from pykv.torch_device import as_device, check_pinnable, free_bytes

__all__ = ["CACHE_DTYPES", "KvPool"]

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a cache without scales can hold, and what weights can be."""

MOST_BLOCKS = 2**40
MOST_BLOCK_SIZE = 65_536


class KvPool:
    """The paged KV cache of one model on one device: the bytes. Which block is whose, the scheduler knows.

    One layer's memory, where each block's keys and values are neighbours:

        # block 0                                    block 1
        # [head 0 slots .. head h slots | the same of values] [...
        #  key_caches[i][0]               value_caches[i][0]

    With several layer groups a block holds the keys and values of one group's layers, and the layers that stand at the
    same place of their groups share memory: whose block it is, the groups' block tables say.

    Attributes:
        layout, groups, num_blocks, block_size, device: as given; block 0 counts and is never handed out.
        format: how rows are stored.
        dtype: of the caches: the format's, or uint8 where the format encodes rows itself.
        key_caches, value_caches: for each layer a strided view [num_blocks, num_kv_heads, block_size,
            head_dim_k or _v], or the rows' bytes instead of the head size. Layers that share keys and values have the
            same views. Where the values are a part of the keys (`KvLayer.head_dim_v` 0: latents) the values' view is
            empty: attention takes that part of the keys.
        kv_scales: for each layer what `paged_attention` takes: float32 [num_blocks, 2, num_kv_heads, block_size]
            where each row has its scale, two numbers where they were given, else None.
        nbytes: the bytes of all blocks, scales included.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int = 16,
        format: CacheType = BF16,
        device: torch.device | str = "cpu",
        *,
        groups: LayerGroups | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Allocates the pool, the null block of each layer with zeros: padding points to it, and nobody writes it.

        On a CPU all blocks are zeros, and pages are taken from the system when they are first written. On a GPU, and in
        memory that a GPU shall reach, the other blocks hold anything until they are written.

        Args:
            format: a `KvFormat`, the name of one, or a dtype of plain numbers.
            groups: the layers that share a block table; None: one table for all layers.
            is_pinned: whether a GPU shall reach it, for a pool in host memory.

        Raises:
            ConfigError: an argument is not of its type or out of its range, the groups are of another layout, the
                format is unknown or none that a cache can have, its rows are not what it says, the device is not there,
                or has fewer bytes left than the pool needs; nothing was allocated.
        """
        self.layout = instance_of("layout", layout, KvLayout, ConfigError)
        self.groups = _checked_groups(groups, layout)
        self.num_blocks = as_integer("num_blocks", num_blocks, 1, MOST_BLOCKS, ConfigError)
        self.block_size = as_integer("block_size", block_size, 1, MOST_BLOCK_SIZE, ConfigError)
        self.format = kv_format_of(format, "format")
        self.dtype = _checked_dtype(self.format)
        _check_rows(self.format, layout)
        _check_latents(self.format, layout)
        self.device = as_device("device", device)
        self._is_pinned = as_boolean("is_pinned", is_pinned, ConfigError)
        if is_pinned:
            check_pinnable("is_pinned", self.device)
        self.nbytes = self.num_blocks * self.groups.block_bytes(layout, self.block_size, self.format)
        self._check_memory()
        self.key_caches, self.value_caches = self._allocate()
        self.kv_scales = self._allocate_scales()

    def copy_blocks(self, pairs: Tensor, backend: str = "auto") -> None:
        """Copies whole blocks in all layers, scales included.

        Args:
            pairs: int64 [num_pairs, 2], (source block, target block); targets differ and none is a source.
            backend: as in `pykv.copy_blocks`.

        Raises:
            TypeError, ValueError: see `pykv.copy_blocks`; nothing was copied.
        """
        layers = self._own_layers()
        keys, values = [layer.key for layer in layers], [layer.value for layer in layers]
        scales = [layer.scales for layer in layers]
        copy_blocks(keys, values, pairs, kv_scales=scales, backend=backend)

    def copy_blocks_to(self, target: KvPool, pairs: Tensor, backend: str = "auto") -> None:
        """Copies whole blocks in all layers, scales included, to another pool: from the device to the host, or back.

        Args:
            target: a pool of the same layout, block size and format; one of the two may be in host memory.
            pairs: int64 [num_pairs, 2] on the device, (block of this pool, block of `target`); targets differ.
            backend: as in `pykv.copy_blocks`.

        Raises:
            InvalidRequestError: `target` is no pool, or none that is alike; nothing was copied.
            TypeError, ValueError: `pairs` is not as above, or, on a CPU, a block is out of range; nothing was copied.
        """
        if self._kind != instance_of("target", target, KvPool, InvalidRequestError)._kind:
            refuse("target", target, "a pool of the layout, groups, block size and format of this one")
        transfer_blocks(self._own_layers(), target._own_layers(), pairs, backend=backend)

    @property
    def _kind(self) -> tuple[object, ...]:
        return self.layout, self.groups, self.block_size, self.format

    def _storages(self) -> list[KvLayer]:
        """What each of the pool's memories is shaped for: the first layer that stores there."""
        layers = {
            storage: layer
            for storage, layer in reversed(list(zip(self.groups.storage_of, self.layout.layers, strict=True)))
            if layer.reads_layer is None
        }
        return [layers[storage] for storage in range(self.groups.num_storages)]

    def _own_layers(self) -> list[LayerCache]:
        """Each memory once, as what is moved."""
        caches: dict[int, LayerCache] = {}
        for storage, key, value, scales in zip(
            self.groups.storage_of, self.key_caches, self.value_caches, self.kv_scales, strict=True
        ):
            caches[storage] = LayerCache(*_movable_parts(key, value), scales)
        return [caches[storage] for storage in sorted(caches)]

    def _check_memory(self) -> None:
        """Fails before anything is allocated: a process that is killed later cannot say why."""
        available = free_bytes(self.device)
        if available is not None and self.nbytes > available:
            fitting = available // (self.nbytes // self.num_blocks)
            raise ConfigError(
                f"num_blocks is {self.num_blocks}: the KV pool needs {self.nbytes} bytes, but {available} bytes of "
                f"{self.device.type} memory are available; at most {fitting} blocks of {self.block_size} tokens fit"
            )

    def _allocate(self) -> tuple[list[Tensor], list[Tensor]]:
        storages = self._storages()
        sizes = [self.num_blocks * self._block_bytes(layer) for layer in storages]
        parts = torch.split(self._memory(sum(sizes)), sizes)
        self._zero_null_blocks(parts)
        views = [self._views(layer, part) for layer, part in zip(storages, parts, strict=True)]
        of_layers = [views[storage] for storage in self.groups.storage_of]
        return [key for key, _ in of_layers], [value for _, value in of_layers]

    def _allocate_scales(self) -> list[KvScales | None]:
        if not isinstance(self.format, DtypeFormat) or not self.format.has_row_scales:
            given = getattr(self.format, "tensor_scales", None)
            return [given] * len(self.layout.layers)
        shapes = [(self.num_blocks, 2, layer.num_kv_heads, self.block_size) for layer in self._storages()]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.split(self._memory(4 * sum(sizes)).view(torch.float32), sizes)
        self._zero_null_blocks(parts)
        views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return [views[storage] for storage in self.groups.storage_of]

    def _row_elements(self, head_dim: int) -> int:
        """The elements of a row in its cache; its scale, if it has one, is elsewhere."""
        if head_dim == 0 or isinstance(self.format, DtypeFormat):
            return head_dim
        return self.format.row_bytes(head_dim)

    def _block_elements(self, layer: KvLayer) -> tuple[int, int]:
        """The elements of a block's keys, and of its values."""
        rows = layer.num_kv_heads * self.block_size
        return rows * self._row_elements(layer.head_dim_k), rows * self._row_elements(layer.head_dim_v)

    def _block_bytes(self, layer: KvLayer) -> int:
        return sum(self._block_elements(layer)) * self.dtype.itemsize

    def _views(self, layer: KvLayer, part: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values: in each block first all heads' keys, then all heads' values."""
        by_block = part.view(self.dtype).view(self.num_blocks, -1)
        keys, values = by_block.tensor_split((self._block_elements(layer)[0],), dim=1)
        shape = (self.num_blocks, layer.num_kv_heads, self.block_size)
        return (
            keys.view(*shape, self._row_elements(layer.head_dim_k)),
            values.view(*shape, self._row_elements(layer.head_dim_v)),
        )

    @property
    def _comes_as_zeros(self) -> bool:
        return self.device.type == "cpu" and not self._is_pinned

    def _zero_null_blocks(self, parts: Sequence[Tensor]) -> None:
        """Writes zeros to the first block of each part, unless that would only take pages of zeros."""
        if not self._comes_as_zeros:
            for part in parts:
                part[: part.numel() // self.num_blocks].zero_()

    def _memory(self, num_bytes: int) -> Tensor:
        """Bytes on the device; zeros on huge pages of the host if the system can and no GPU must reach them."""
        if not self._comes_as_zeros or num_bytes == 0:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self._is_pinned)
        return torch.frombuffer(anonymous_memory(num_bytes), dtype=torch.uint8, count=num_bytes)


def _movable_parts(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's rows in two parts, neither of them empty: a latent is moved in halves."""
    if value.shape[-1] == 0:
        half = key.shape[-1] // 2
        key, value = key[..., :half], key[..., half:]
    return key, value


def _checked_dtype(format: KvFormat) -> torch.dtype:
    if not isinstance(format, DtypeFormat):
        return torch.uint8
    dtype: torch.dtype | None = getattr(torch, format.dtype_name, None)
    if dtype is None or (dtype not in CACHE_DTYPES and not format.is_scaled):
        allowed = ", ".join(map(str, CACHE_DTYPES))
        raise ConfigError(
            f"format of the KV pool is {format.dtype_name}: allowed are {allowed} and the formats by name"
        )
    return dtype


def _check_latents(form: KvFormat, layout: KvLayout) -> None:
    has_latents = any(layer.head_dim_v == 0 for layer in layout.layers)
    if has_latents and isinstance(form, DtypeFormat) and form.has_row_scales:
        raise ConfigError(
            f"format of the KV pool is {form.name} with a scale for each key and value: allowed for latents are plain "
            "dtypes, scales that are given, and formats that encode rows"
        )


def _check_rows(form: KvFormat, layout: KvLayout) -> None:
    """Tries a format from anywhere on the sizes that it will meet."""
    for size in sorted(
        {size for layer in layout.layers for size in (layer.head_dim_k, layer.head_dim_v) if size}
    ):
        row_bytes = checked_row_bytes(form, size)
        if isinstance(form, CodecFormat):
            rows = torch.zeros(2, 3, size)
            codes = _coded("encode", form, rows, torch.uint8, row_bytes)
            _coded("decode", form, codes, torch.float32, size)


def _coded(method: str, form: CodecFormat, of: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """What `encode` or `decode` of a format makes of [2, 3, ...], checked."""
    try:
        found = form.encode(of) if method == "encode" else form.decode(of, width)
    except Exception as error:  # the format is somebody's own code
        raise ConfigError(f"the KV format {form.name!r} fails in {method}: {error!r}") from error
    shape = (2, 3, width)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype is not dtype:
        got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ConfigError(
            f"the KV format {form.name!r} returns {got} from {method} of {tuple(of.shape)}: allowed is {dtype} {shape}"
        )
    return found


def _checked_groups(groups: LayerGroups | None, layout: KvLayout) -> LayerGroups:
    if groups is None:
        return LayerGroups.together(layout)
    if len(instance_of("groups", groups, LayerGroups, ConfigError).storage_of) != layout.num_layers:
        refuse("groups", groups, f"groups of the layout's {layout.num_layers} layers", ConfigError)
    return groups
