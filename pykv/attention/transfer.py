"""Copies of whole blocks from one pool to another: out of a device's memory into the host's, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pykv.attention import checks, contents
from pykv.attention.backends import backend_for
from pykv.attention.layer_cache import LayerCache
from pykv.attention.scales import KvScales, checked_scales
from pykv.field_checks import shown


def transfer_blocks(
    sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor, *, backend: str = "auto"
) -> None:
    """Copies whole blocks, in every layer, from one pool to another.

    Args:
        sources, targets: the layers of the two pools, which differ in nothing but the number of blocks and share no
            memory; caches of 8 bits with their scales. One of the pools may be in pinned memory of the host, the other
            on the GPU.
        pairs: int64 [num_pairs, 2], (block of a source, block of its target), on the GPU if there is one. Targets
            differ.
        backend: "auto", "torch", "cpu" or "triton".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the layers do not fit each other; on a CPU also: a block is out of range or a target comes twice.
            Nothing was copied.
    """
    device = checks.check_pairs_of_blocks(pairs)
    _check_layers("sources", sources)
    _check_layers("targets", targets)
    _check_alike(sources, targets)
    loaded = backend_for(backend, device, checks.widest_dtype(layer.key for layer in sources))
    if not sources or not len(pairs):
        return
    if device.type == "cpu":
        num_blocks = [min(layer.key.shape[0] for layer in layers) for layers in (sources, targets)]
        contents.check_transfers(pairs, *num_blocks)
    loaded.functions.transfer_blocks(
        [layer.as_numbers() for layer in sources], [layer.as_numbers() for layer in targets], pairs
    )


def _check_layers(name: str, layers: Sequence[LayerCache]) -> None:
    checks.check_sequence(name, layers)
    for index, layer in enumerate(layers):
        what = f"{name}[{index}]"
        if not isinstance(layer, LayerCache):
            raise TypeError(f"{what} is {shown(layer)}; it must be a LayerCache")
        device = checks.device_of(f"{what}.key", layer.key)
        checks.check_moved(f"{what}.key", layer.key)
        checks.check_caches(layer.key, layer.value, device, f"{what}.key", f"{what}.value")
        checked_scales(layer.scales, layer.key, f"{what}.scales")


def _check_alike(sources: Sequence[LayerCache], targets: Sequence[LayerCache]) -> None:
    checks.check_as_many("sources", sources, "targets", targets)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for name in ("key", "value", "scales"):
            _check_same(f"[{index}].{name}", getattr(source, name), getattr(target, name))
        for name, part in zip(("key", "value", "scales"), target.parts(), strict=False):
            names = (f"targets[{index}].{name}", *[f"sources[{index}]"] * 3)
            on_one_device = [other for other in source.parts() if other.device == part.device]
            checks.check_apart(names, (part, *on_one_device), num_written=1)


def _check_same(name: str, source: KvScales | None, target: KvScales | None) -> None:
    kinds = [(part.dtype, *part.shape[1:]) if isinstance(part, Tensor) else part for part in (source, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"sources{name} and targets{name} must be alike but for the number of blocks: {kinds[0]} and {kinds[1]}"
        )
