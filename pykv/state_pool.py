"""The tensors that hold states of fixed size, slot by slot: those that sequences work in, and checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from pykv.errors import ConfigError, InvalidRequestError
from pykv.field_checks import as_integer, instance_of
from pykv.layer_groups import StateGroup, StateTensor
from pykv.torch_device import as_device

__all__ = ["StatePool"]

MOST_SLOTS = 2**24


class StatePool:
    """The states of one model on one device: the bytes. Which slot is whose, the scheduler knows.

    A step copies `state_restore_pairs`, runs the model, which reads and overwrites the slots in `state_slots`, and
    copies `state_save_pairs`.

    Attributes:
        group, num_slots, device: as given; slot 0 is the initial state, zeros unless you write another one there before
            the first step.
        states: for each layer and tensor of the group [num_slots, *shape].
        nbytes: the bytes of all slots.
    """

    def __init__(self, group: StateGroup, num_slots: int, device: torch.device | str = "cpu") -> None:
        """Allocates the pool, all zeros.

        Raises:
            ConfigError: there are fewer than 2 slots, another argument is not of its type, or the machine has no such
                device; nothing was allocated.
        """
        self.group = instance_of("group", group, StateGroup, ConfigError)
        self.num_slots = as_integer("num_slots", num_slots, 2, MOST_SLOTS, ConfigError)
        self.device = as_device("device", device)
        self.nbytes = num_slots * group.slot_bytes
        self.states = tuple(tuple(map(self._allocate, layer)) for layer in group.layers)

    def copy(self, pairs: Tensor) -> None:
        """Copies whole slots in all layers, in any order: no target is a source or another pair's target.

        Args:
            pairs: int64 [num_pairs, 2] on the pool's device, (source slot, target slot).

        Raises:
            InvalidRequestError: `pairs` is no tensor, has another shape, dtype or device, or, on a CPU, names a slot
                that is not there; nothing was copied.
        """
        self._check_pairs(instance_of("pairs", pairs, Tensor, InvalidRequestError))
        if pairs.shape[0] == 0:
            return
        sources, targets = pairs.unbind(1)
        for layer in self.states:
            for state in layer:
                state.index_copy_(0, targets, state.index_select(0, sources))

    def _check_pairs(self, pairs: Tensor) -> None:
        wanted = f"a tensor of int64 [num_pairs, 2] on {self.device}"
        if pairs.dtype is not torch.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
            dtype = str(pairs.dtype).removeprefix("torch.")
            raise InvalidRequestError(f"pairs is {dtype} {list(pairs.shape)}: allowed is {wanted}", "pairs")
        if pairs.device.type != self.device.type:
            raise InvalidRequestError(f"pairs is on {pairs.device}: allowed is {wanted}", "pairs")
        if self.device.type == "cpu" and pairs.numel():  # elsewhere looking would wait for the device
            for slot in (int(pairs.min()), int(pairs.max())):
                as_integer("pairs", slot, 0, self.num_slots - 1)

    def _allocate(self, tensor: StateTensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return torch.zeros(self.num_slots, *tensor.shape, dtype=dtype, device=self.device)
