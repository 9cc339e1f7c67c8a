"""A step's tensors where they were uploaded to the device, and what the host knows of the step beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pykv.engine.device.buckets import bucket_of, fill_up, is_decode
from pykv.engine.device.step_arrays import DeviceArrays, HostArrays
from pykv.engine.step_tensors import Indices, StepTensors, StepViews
from pykv.scheduler import Plan, SchedulerConfig, StepBuffers


class DeviceStepViews(StepViews):
    """The tensors of one set of step buffers, on the device.

    Args:
        arrays: where all sets arrive, one at a time.
        buckets: batches of decodes are filled up to one of these sizes.
        before_upload: called before the arrays of the step before are written over.
    """

    def __init__(
        self,
        arrays: DeviceArrays,
        config: SchedulerConfig,
        buckets: Sequence[int] = (),
        before_upload: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = HostArrays(arrays, config)
        self.buffers = self._host.buffers
        self._device = arrays.device.torch_device
        self._set(arrays.views)
        self._sample_indices = arrays.views["sample_indices"]
        self._block_size = config.block_size
        self._buckets = buckets
        self._before_upload = before_upload

    def wait(self) -> None:
        self._host.wait()

    def upload(self, plan: Plan) -> None:
        bucket = bucket_of(plan.num_batch_rows, self._buckets) if is_decode(plan) else None
        if bucket is not None:
            fill_up(self.buffers, plan, bucket)
        self._before_upload()
        self._host.upload(plan)

    def step(self, plan: Plan, logits_indices: Indices) -> StepTensors:
        step = super().step(plan, logits_indices)
        return replace(
            step,
            share_prefixes=begin_alike(plan, self.buffers),
            copies_may_overlap=copies_may_overlap(plan, self.buffers, self._block_size),
        )

    def _indices(self, logits_indices: Indices) -> torch.Tensor:
        """The samples' own indices have been uploaded; others are brought now."""
        if np.shares_memory(logits_indices, self.buffers.sample_indices):
            return self._sample_indices[: len(logits_indices)]
        return super()._indices(logits_indices)


def begin_alike(plan: Plan, buffers: StepBuffers) -> bool:
    """Whether two of the step's rows have the same first block in some layer group."""
    rows = buffers.table_rows[: plan.num_batch_rows]
    firsts = np.sort(buffers.block_tables[..., 0][..., rows], axis=-1)
    return bool(((firsts[..., 1:] == firsts[..., :-1]) & (firsts[..., 1:] != 0)).any())


def copies_may_overlap(plan: Plan, buffers: StepBuffers, block_size: int) -> bool:
    """Whether all copies of a step are swap-outs of blocks that the step does not write."""
    if plan.num_swap_ins or plan.num_copies or not plan.num_swap_outs:
        return False
    written = buffers.slot_mapping[..., : plan.num_tokens] // block_size
    return not bool(np.isin(buffers.swap_out_pairs[: plan.num_swap_outs, 0], written).any())
