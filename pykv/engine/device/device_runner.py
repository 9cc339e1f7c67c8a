"""A model on a device whose work is launched and done later."""

from __future__ import annotations

import logging

import torch

from pykv.engine.device.block_copies import BlockCopies
from pykv.engine.device.buckets import decode_buckets
from pykv.engine.device.decode_graphs import DecodeGraphs
from pykv.engine.device.interface import Device
from pykv.engine.device.step_arrays import DeviceArrays
from pykv.engine.device.views import DeviceStepViews
from pykv.engine.runner import ModelRunner
from pykv.engine.step_tensors import StepTensors
from pykv.kv_pool import KvPool
from pykv.models.causal_model import CausalModel
from pykv.scheduler import SchedulerConfig

_log = logging.getLogger("pykv.engine")


class DeviceRunner(ModelRunner):
    """As its base, with copies of blocks on a stream of their own and decodes that are replayed.

    Args:
        model, pool, attention_backend, swap_pool: as in `ModelRunner`.
        device: where they are.
        uses_graphs: whether decodes are recorded when the engine starts.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: KvPool,
        attention_backend: str,
        swap_pool: KvPool | None = None,
        *,
        device: Device,
        uses_graphs: bool = True,
    ) -> None:
        super().__init__(model, pool, attention_backend, swap_pool)
        self._on = device
        self._uses_graphs = uses_graphs
        self._copies = BlockCopies(device)
        self._graphs: DecodeGraphs | None = None

    def step_views(self, config: SchedulerConfig) -> list[DeviceStepViews]:
        """A ring of two sets of host arrays over one set on the device; records the decodes that will read them."""
        arrays = DeviceArrays(self._on, config)
        largest = min(config.max_num_seqs, config.max_num_batched_tokens)
        buckets = decode_buckets(largest) if self._uses_graphs else ()
        if buckets:
            self._graphs = self._recorded(arrays, buckets)
        return [DeviceStepViews(arrays, config, buckets, self._copies.join) for _ in range(2)]

    @property
    def recorded_batches(self) -> tuple[int, ...]:
        """The batch sizes whose decodes are replayed; none before an engine was made, or where that is not possible."""
        return () if self._graphs is None else self._graphs.batches

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self._copies.run(lambda: super(DeviceRunner, self).copy_blocks(pairs))

    def swap_out(self, pairs: torch.Tensor) -> None:
        self._copies.run(lambda: super(DeviceRunner, self).swap_out(pairs))

    def swap_in(self, pairs: torch.Tensor) -> None:
        self._copies.run(lambda: super(DeviceRunner, self).swap_in(pairs))

    def forward(self, step: StepTensors) -> torch.Tensor:
        if not step.copies_may_overlap:
            self._copies.join()
        with self._on.active():
            logits = None if self._graphs is None else self._graphs.run(step)
            return super().forward(step) if logits is None else logits

    def _recorded(self, arrays: DeviceArrays, buckets: tuple[int, ...]) -> DecodeGraphs | None:
        """The decodes; None where the model does something that cannot be recorded."""
        largest = buckets[-1]
        views = arrays.views
        views["slot_mapping"][..., :largest] = -1
        views["query_starts"][: largest + 1] = torch.arange(
            largest + 1, dtype=torch.int32, device=views["query_starts"].device
        )
        graphs = DecodeGraphs(self._on, super().forward, views, buckets)
        try:
            with torch.inference_mode():
                graphs.record_all()
        except RuntimeError as error:
            _log.warning("decodes of %s cannot be recorded and are launched one by one: %s", self.name, error)
            return None
        return graphs
