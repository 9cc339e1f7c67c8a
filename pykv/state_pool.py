"""The tensors that hold states of fixed size, slot by slot: those that sequences work in, and checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from pykv.errors import ConfigError
from pykv.layer_groups import StateGroup, StateTensor

__all__ = ["StatePool"]


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
            ConfigError: there are fewer than 2 slots.
        """
        if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 2:
            raise ConfigError(f"num_slots is {num_slots!r}: allowed is a whole number of 2 or more")
        self.group = group
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.nbytes = num_slots * group.slot_bytes
        self.states = tuple(tuple(map(self._allocate, layer)) for layer in group.layers)

    def copy(self, pairs: Tensor) -> None:
        """Copies whole slots in all layers, in any order: no target is a source or another pair's target.

        Args:
            pairs: int64 [num_pairs, 2] on the pool's device, (source slot, target slot).

        Raises:
            ValueError: `pairs` has another shape or dtype; nothing was copied.
        """
        if pairs.dtype is not torch.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"pairs is {pairs.dtype} {list(pairs.shape)}: needed is int64 [num_pairs, 2]")
        if pairs.shape[0] == 0:
            return
        sources, targets = pairs.unbind(1)
        for layer in self.states:
            for state in layer:
                state.index_copy_(0, targets, state.index_select(0, sources))

    def _allocate(self, tensor: StateTensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        return torch.zeros(self.num_slots, *tensor.shape, dtype=dtype, device=self.device)
