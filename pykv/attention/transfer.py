"""Copies of whole blocks from one pool to another: out of a device's memory into the host's, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention import checks, contents
from pykv.attention.backends import backend_for
from pykv.attention.layer_cache import LayerCache


def transfer_blocks(
    sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor, *, backend: str = "auto"
) -> None:
    """Copies whole blocks, in every layer, from one pool to another.

    Args:
        sources, targets: the layers of the two pools, which differ in nothing but the number of blocks and share no
            memory. One of the pools may be in pinned memory of the host, the other on the GPU.
        pairs: int64 [num_pairs, 2], (block of a source, block of its target), on the GPU if there is one. Targets
            differ.
        backend: "auto", "torch", "cpu" or "triton".

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: the layers do not fit each other; on a CPU also: a block is out of range or a target comes twice.
            Nothing was copied.
    """
    device = checks.device_of("pairs", pairs)
    checks.check_tensor("pairs", pairs, 2, torch.int64, device)
    checks.check_shape("pairs", pairs, (pairs.shape[0], 2), "(num_pairs, 2)")
    checks.check_last_contiguous("pairs", pairs)
    _check_alike(sources, targets)
    if not sources or not len(pairs):
        return
    loaded = backend_for(backend, device, sources[0].key.dtype)
    if device.type == "cpu":
        num_blocks = [min(layer.key.shape[0] for layer in layers) for layers in (sources, targets)]
        contents.check_transfers(pairs, *num_blocks)
    loaded.functions.transfer_blocks(sources, targets, pairs)


def _check_alike(sources: Sequence[LayerCache], targets: Sequence[LayerCache]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"sources has {len(sources)} layers; targets has {len(targets)}")
    for source, target in zip(sources, targets, strict=True):
        for layer in (source, target):
            checks.check_caches(layer.key, layer.value, layer.key.device)
        for name in ("key", "value", "scales"):
            _check_same(name, getattr(source, name), getattr(target, name))


def _check_same(name: str, source: Tensor | None, target: Tensor | None) -> None:
    blocks = [None if part is None else (part.dtype, tuple(part.shape[1:])) for part in (source, target)]
    if blocks[0] != blocks[1]:
        raise ValueError(f"the {name} of a source are blocks of {blocks[0]}; its target's of {blocks[1]}")
