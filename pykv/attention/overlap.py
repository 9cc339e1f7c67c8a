"""Whether elements share memory, told by addresses, sizes and strides alone: nothing waits for a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

__all__ = ["clash", "repeats_itself"]

_Axes = list[tuple[int, int]]
"""(stride in bytes, size) of the axes longer than 1, the widest stride first."""


def repeats_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may be the same memory: those of an expanded one are."""
    return not tensor.is_contiguous() and _repeats(tensor.shape, tensor.stride())


def clash(tensors: Sequence[Tensor | None], num_written: int) -> tuple[int, int] | None:
    """Returns the places of one of the first `num_written` tensors and of a later one that may share memory with it.

    Views that take turns in one buffer (a pool's keys and values) share none. Where strides differ so that this takes
    more than a comparison of rows, they may.
    """
    ranges = [_NOWHERE if tensor is None else _range(tensor) for tensor in tensors]
    for place in range(num_written):
        start, end = ranges[place]
        for other in range(place + 1, len(ranges)):
            other_start, other_end = ranges[other]
            if start < other_end and other_start < end and _share(tensors[place], tensors[other]):
                return place, other
    return None


_NOWHERE = (0, 0)


def _range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    return start, start + (_span(_axes(*_form(tensor)), tensor.itemsize) if tensor.numel() else 0)


def _share(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether tensors may share an element whose ranges of addresses do."""
    if first is None or second is None or not first.numel() or not second.numel():
        return False
    distance = second.data_ptr() - first.data_ptr()
    if distance < 0:
        first, second = second, first
    return _meet(*_form(first), *_form(second), abs(distance))


def _form(tensor: Tensor) -> tuple[Sequence[int], Sequence[int], int]:
    return tensor.shape, tensor.stride(), tensor.itemsize


def _axes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> _Axes:
    axes = zip(strides, shape, strict=True)
    return sorted(((stride * itemsize, size) for stride, size in axes if size > 1), reverse=True)


def _span(axes: _Axes, itemsize: int) -> int:
    return itemsize + sum(stride * (size - 1) for stride, size in axes)


@functools.lru_cache(maxsize=1024)
def _repeats(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return False
    axes = _axes(shape, strides, 1)
    return any(stride < _span(axes[place + 1 :], 1) for place, (stride, _) in enumerate(axes))


@functools.lru_cache(maxsize=1024)
def _meet(
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    other_shape: Sequence[int],
    other_strides: Sequence[int],
    other_itemsize: int,
    distance: int,
) -> bool:
    """Whether tensors meet of which the other begins `distance` bytes behind the first, inside of it."""
    axes, others = _axes(shape, strides, itemsize), _axes(other_shape, other_strides, other_itemsize)
    while axes and others and axes[0][0] == others[0][0] > 0:
        stride = axes[0][0]
        axes, others = axes[1:], others[1:]
        distance %= stride
        if distance + _span(others, other_itemsize) > stride:
            return True
        if distance >= _span(axes, itemsize):
            return False
    return True
