"""Makes a model that pykv itself has read faster, without a change that its owner could see in the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from pykv.models.packed_linear import PackedLinear, can_pack

__all__ = ["pack_linears"]


def pack_linears(module: nn.Module, still_right: Callable[[], bool]) -> int:
    """Replaces the weights of the linear layers by packed ones, one layer after the other.

    The plain weights are given up, unless another layer has the same: memory does not grow. A model that reads
    the weight of a linear layer in another way than by calling the layer is left as it was.

    Args:
        module: a model that nobody else uses; its linear layers get a forward of their own.
        still_right: runs the model and says whether its results are as before.

    Returns:
        How many layers are packed.
    """
    linears = [layer for layer in module.modules() if can_pack(layer) and isinstance(layer, nn.Linear)]
    owners = Counter(id(parameter) for layer in module.modules() for parameter in _own_parameters(layer))
    weights = {linear: linear.weight.data for linear in linears}
    for linear in linears:
        _take_weight(linear, owners[id(linear.weight)] == 1)
    if not still_right():
        for linear, weight in weights.items():
            _give_back(linear, weight)
        return 0
    num_packed = sum(_pack(linear, weights) for linear in linears)
    _leave_file(module)
    return num_packed


def _own_parameters(layer: nn.Module) -> list[nn.Parameter]:
    return list(layer.parameters(recurse=False))


def _take_weight(linear: nn.Linear, is_only_owner: bool) -> None:
    """The layer computes from its weight, but whoever else looks for it there finds NaN."""
    weight = linear.weight.data
    linear.forward = partial(nn.functional.linear, weight=weight, bias=linear.bias)  # type: ignore[method-assign]
    if is_only_owner:
        linear.weight.data = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


def _give_back(linear: nn.Linear, weight: Tensor) -> None:
    del linear.forward
    linear.weight.data = weight


def _leave_file(module: nn.Module) -> None:
    """Copies what was not packed, so that the file in which all the weights were read can leave the memory."""
    for parameter in module.parameters():
        if parameter.data.is_contiguous():  # the placeholders of `_take_weight` are not
            parameter.data = parameter.data.clone()


def _pack(linear: nn.Linear, weights: dict[nn.Linear, Tensor]) -> bool:
    """Packs one layer and drops its plain weight; a layer that would compute something else keeps it."""
    weight = weights.pop(linear)
    packed = PackedLinear.of(linear, weight)
    if not packed.agrees_with(weight):
        return False
    linear.forward = packed.compute  # type: ignore[method-assign]
    return True
