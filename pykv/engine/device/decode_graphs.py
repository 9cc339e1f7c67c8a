"""Decodes that were recorded once for each batch size, and are replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pykv.engine.device.buckets import bucket_of
from pykv.engine.device.interface import Device, Recording
from pykv.engine.step_tensors import StepTensors


class DecodeGraphs:
    """One recording a batch size, with and without looking for shared prefixes.

    All of them read the device's arrays where these are, so a replay copies nothing. Rows behind a step's own must be
    filled up (`buckets.fill_up`).

    Args:
        forward: the model; it reads nothing back.
        arrays: of the device, by name.
        buckets: the batch sizes, ascending.
    """

    def __init__(
        self,
        device: Device,
        forward: Callable[[StepTensors], torch.Tensor],
        arrays: Mapping[str, torch.Tensor],
        buckets: Sequence[int],
    ) -> None:
        self._device = device
        self._forward = forward
        self._arrays = arrays
        self._buckets = buckets
        self._recordings: dict[tuple[int, bool], Recording] = {}

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that were recorded, ascending."""
        return tuple(sorted({bucket for bucket, _ in self._recordings}))

    def record_all(self) -> None:
        """Records every batch size, the largest first: smaller ones then fit in the memory that it took.

        All leave their logits in the same place, or each recording would keep room for its own. The arrays must hold
        rows that are filled up, from the first on.
        """
        with self._device.active():
            logits = torch.empty_like(self._forward(self._step(self._buckets[-1], share_prefixes=False)))
        for bucket in reversed(self._buckets):
            for share_prefixes in (False, True) if bucket > 1 else (False,):
                step, into = self._step(bucket, share_prefixes), logits[:bucket]
                self._recordings[bucket, share_prefixes] = self._device.record(
                    lambda step=step, into=into: into.copy_(self._forward(step))  # type: ignore[misc]
                )

    def run(self, step: StepTensors) -> torch.Tensor | None:
        """Replays a decode.

        Returns:
            float32 [num_logits, vocab_size], which the next replay writes over; None where nothing was recorded for
            such a step.
        """
        key = self._key(step)
        if key is None:
            return None
        recording = self._recordings[key]
        recording.replay()
        return recording.output[: len(step.logits_indices)]

    def _key(self, step: StepTensors) -> tuple[int, bool] | None:
        num_rows, num_logits = len(step.seq_lens), len(step.logits_indices)
        uploaded = step.logits_indices.data_ptr() == self._arrays["sample_indices"].data_ptr()
        if len(step.token_ids) != num_rows or num_logits > num_rows or not uploaded:
            return None
        bucket = bucket_of(num_rows, self._buckets)
        key = None if bucket is None else (bucket, step.share_prefixes and bucket > 1)
        return key if key in self._recordings else None

    def _step(self, bucket: int, share_prefixes: bool) -> StepTensors:
        arrays = self._arrays
        return StepTensors(
            token_ids=arrays["token_ids"][:bucket],
            positions=arrays["positions"][:bucket],
            slot_mapping=arrays["slot_mapping"][..., :bucket],
            block_tables=arrays["block_tables"],
            seq_lens=arrays["seq_lens"][:bucket],
            table_rows=arrays["table_rows"][:bucket],
            query_starts=arrays["query_starts"][: bucket + 1],
            logits_indices=arrays["sample_indices"][:bucket],
            share_prefixes=share_prefixes,
        )
