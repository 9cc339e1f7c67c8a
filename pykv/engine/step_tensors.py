"""One step's work as tensors: views of the scheduler's host arrays, made once and sliced a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pykv.scheduler import Plan, StepBuffers

Indices = npt.NDArray[np.int64]
READ = (
    "token_ids",
    "positions",
    "slot_mapping",
    "block_tables",
    "seq_lens",
    "table_rows",
    "query_starts",
    "copy_pairs",
    "swap_out_pairs",
    "swap_in_pairs",
)
"""What the model and the copies read of the buffers."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a model gets to compute.

    Attributes:
        token_ids, positions: int64 [num_tokens].
        slot_mapping: int64 [num_tokens]; with several layer groups [num_groups, num_tokens].
        block_tables: int32 [max_num_seqs, max_blocks_per_seq], or [num_groups, ...].
        seq_lens, table_rows: int32 [num_batch_rows].
        query_starts: int32 [num_batch_rows + 1].
        logits_indices: int64 [num_logits], the tokens whose logits are wanted, some more than once.
        share_prefixes: whether decodes may have keys in common, so that it may pay to look for them.
        copies_may_overlap: whether the step touches no block that its copies write, and writes none that they read.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    table_rows: torch.Tensor
    query_starts: torch.Tensor
    logits_indices: torch.Tensor
    share_prefixes: bool = True
    copies_may_overlap: bool = False


class StepViews:
    """The tensors of one set of step buffers.

    Args:
        buffers: the scheduler fills them; shared, not copied, where the device is the CPU.
        device: of the model.
    """

    def __init__(self, buffers: StepBuffers, device: torch.device) -> None:
        self.buffers = buffers
        self._device = device
        self._set({name: torch.from_numpy(getattr(buffers, name)) for name in READ})

    def _set(self, arrays: Mapping[str, torch.Tensor]) -> None:
        self._token_ids = arrays["token_ids"]
        self._positions = arrays["positions"]
        self._slot_mapping = arrays["slot_mapping"]
        self._block_tables = arrays["block_tables"]
        self._seq_lens = arrays["seq_lens"]
        self._table_rows = arrays["table_rows"]
        self._query_starts = arrays["query_starts"]
        self._copy_pairs = arrays["copy_pairs"]
        self._swap_out_pairs = arrays["swap_out_pairs"]
        self._swap_in_pairs = arrays["swap_in_pairs"]

    def wait(self) -> None:
        """Holds the calling thread until the buffers may be filled again."""

    def upload(self, plan: Plan) -> None:
        """Brings the arrays of a plan to the device, where that is not done as they are asked for."""

    def copies(self, plan: Plan) -> torch.Tensor:
        """Returns int64 [num_copies, 2]: blocks to copy, source and target, before the model runs."""
        return self._copy_pairs[: plan.num_copies].to(self._device)

    def swap_outs(self, plan: Plan) -> torch.Tensor:
        """Returns int64 [num_swap_outs, 2]: blocks to copy to the host, before all other copies."""
        return self._swap_out_pairs[: plan.num_swap_outs].to(self._device)

    def swap_ins(self, plan: Plan) -> torch.Tensor:
        """Returns int64 [num_swap_ins, 2]: blocks to copy from the host, before the copies."""
        return self._swap_in_pairs[: plan.num_swap_ins].to(self._device)

    def step(self, plan: Plan, logits_indices: Indices) -> StepTensors:
        """Returns the whole step."""
        return self._part(0, plan.num_batch_rows, 0, plan.num_tokens, self._indices(logits_indices))

    def alone(self, batch_row: int, logits_indices: Indices) -> StepTensors:
        """Returns the part of the step that one batch row computes; the indices count from its first token."""
        first, end = self.buffers.query_starts[batch_row : batch_row + 2].tolist()
        return self._part(batch_row, batch_row + 1, first, end, self._indices(logits_indices))

    def _indices(self, logits_indices: Indices) -> torch.Tensor:
        return torch.from_numpy(logits_indices)

    def _part(self, row: int, end_row: int, token: int, end_token: int, indices: torch.Tensor) -> StepTensors:
        starts = self._query_starts[row : end_row + 1]
        device = self._device
        return StepTensors(
            self._token_ids[token:end_token].to(device),
            self._positions[token:end_token].to(device),
            self._slot_mapping[..., token:end_token].to(device),
            self._block_tables.to(device),
            self._seq_lens[row:end_row].to(device),
            self._table_rows[row:end_row].to(device),
            (starts - token if token else starts).to(device),
            indices.to(device),
        )
