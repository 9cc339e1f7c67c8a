"""Linear layers that are called one after the other with the same input, and so can be one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["CallRecorder", "Siblings"]


class Siblings:
    """One product for several layers: the first that is called computes the results of all.

    The results are views of one tensor, and each is given out once. The forward of a model must run in one thread
    at a time.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        """Args:

        compute: gives the layers' results, joined along the last dimension.
        sizes: the size of each layer's result.
        """
        self._compute = compute
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def part(self, index: int, input: Tensor) -> Tensor:
        """The result of the layer `index`."""
        if input is not self._input or index not in self._parts:
            self._parts = dict(enumerate(torch.split(self._compute(input), self._sizes, dim=-1)))
            self._input = input
        found = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return found


class CallRecorder:
    """Sees which layers are called with the same input, one directly after the other.

    Attributes:
        groups: the layers, grouped, in the order of their first calls.
    """

    def __init__(self) -> None:
        self.groups: list[list[nn.Linear]] = []
        self._seen: set[nn.Linear] = set()
        self._last_input: Tensor | None = None

    def record(self, layer: nn.Linear, input: Tensor) -> None:
        """To be told of each call."""
        if layer not in self._seen:
            self._seen.add(layer)
            if input is self._last_input and _can_join(self.groups[-1][-1], layer):
                self.groups[-1].append(layer)
            else:
                self.groups.append([layer])
        self._last_input = input


def _can_join(first: nn.Linear, second: nn.Linear) -> bool:
    return (first.bias is None) == (second.bias is None) and first.weight.dtype == second.weight.dtype
