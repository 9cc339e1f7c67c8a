"""Makes a model that pykv itself has read faster, without a change that its owner could see in the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from pykv.models.packed_linear import PackedLinear, can_pack
from pykv.models.siblings import CallRecorder, Siblings

__all__ = ["has_packable", "pack_linears"]

Weights = dict[nn.Linear, Tensor]


def has_packable(module: nn.Module) -> bool:
    """Whether `pack_linears` has anything to do: on a GPU, or where all layers are small, it has not."""
    return any(_is_packable(layer) for layer in module.modules())


def pack_linears(module: nn.Module, still_right: Callable[[], bool]) -> int:
    """Replaces the weights of the linear layers by packed ones; layers with the same input become one product.

    The plain weights are given up, unless another layer has the same: memory does not grow. A model that reads
    the weight of a linear layer in another way than by calling the layer is left as it was.

    Args:
        module: a model that nobody else uses; its linear layers get a forward of their own.
        still_right: runs the model and says whether its results are as before.

    Returns:
        How many layers are packed.
    """
    weights = {layer: layer.weight.data for layer in module.modules() if _is_packable(layer)}
    groups = _recorded_groups(module, weights, still_right)
    if not groups:
        return 0
    if not _tried(groups, weights, still_right):
        groups = [[layer] for group in groups for layer in group]
    num_packed = sum(_pack(group, weights) for group in groups)
    _leave_file(module)
    return num_packed


def _is_packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return can_pack(layer)


def _recorded_groups(
    module: nn.Module, weights: Weights, still_right: Callable[[], bool]
) -> list[list[nn.Linear]]:
    """Which layers are called with the same input; none at all if the model reads their weights itself."""
    recorder = CallRecorder()
    owners = Counter(id(weight) for layer in module.modules() for weight in layer.parameters(recurse=False))
    for layer in weights:
        _take_weight(layer, recorder, is_only_owner=owners[id(layer.weight)] == 1)
    if still_right():
        called = {layer for group in recorder.groups for layer in group}
        return recorder.groups + [[layer] for layer in weights if layer not in called]
    for layer, weight in weights.items():
        del layer.forward
        layer.weight.data = weight
    return []


def _take_weight(layer: nn.Linear, recorder: CallRecorder, is_only_owner: bool) -> None:
    """The layer computes from its weight, but whoever else looks for it there finds NaN."""
    weight = layer.weight.data

    def forward(input: Tensor) -> Tensor:
        recorder.record(layer, input)
        return nn.functional.linear(input, weight, layer.bias)

    layer.forward = forward  # type: ignore[method-assign]
    if is_only_owner:
        layer.weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


def _tried(groups: Sequence[Sequence[nn.Linear]], weights: Weights, still_right: Callable[[], bool]) -> bool:
    """Whether the model takes results that are parts of one tensor; some ask for contiguous ones."""
    for group in groups:
        plain = [partial(nn.functional.linear, weight=weights[layer], bias=layer.bias) for layer in group]
        _call_together(group, partial(_joined, plain))
    try:
        return still_right()
    except (RuntimeError, ValueError):
        return False


def _joined(layers: Sequence[Callable[[Tensor], Tensor]], input: Tensor) -> Tensor:
    return torch.cat([layer(input) for layer in layers], dim=-1)


def _call_together(group: Sequence[nn.Linear], compute: Callable[[Tensor], Tensor]) -> None:
    if len(group) == 1:
        group[0].forward = compute  # type: ignore[method-assign, assignment]
        return
    siblings = Siblings(compute, [layer.out_features for layer in group])
    for index, layer in enumerate(group):
        layer.forward = partial(siblings.part, index)  # type: ignore[method-assign]


def _pack(group: Sequence[nn.Linear], weights: Weights) -> int:
    """Packs the layers and drops their plain weights; those that would compute something else keep them."""
    weight = torch.cat([weights[layer] for layer in group]) if len(group) > 1 else weights[group[0]]
    biases = [layer.bias.detach() for layer in group if layer.bias is not None]
    packed = PackedLinear.of(weight, torch.cat(biases) if biases else None)
    if not packed.agrees_with(weight):
        return 0
    _call_together(group, packed.compute)
    for layer in group:
        del weights[layer]
    return len(group)


def _leave_file(module: nn.Module) -> None:
    """Copies what was not packed, so that the file in which all the weights were read can leave the memory."""
    for parameter in module.parameters():
        if parameter.data.is_contiguous():  # the placeholders of `_take_weight` are not
            parameter.data = parameter.data.clone()
