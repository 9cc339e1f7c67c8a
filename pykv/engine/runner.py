"""What the engine needs of a model, and how a model of transformers gives it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pykv.engine.step_tensors import StepTensors
from pykv.errors import ConfigError, StepError
from pykv.field_checks import refuse
from pykv.kv_pool import KvPool
from pykv.models.causal_model import CausalModel
from pykv.models.step_context import StepContext


class Runner(Protocol):
    """A model with its KV cache.

    Attributes:
        name: what to call the model.
        vocab_size: number of token ids, and of logits.
        max_model_len: most tokens of a sequence.
        eos_token_ids: tokens that end a generation.
        device: where it computes.
        num_blocks, block_size: of its KV cache; block 0 counts and is never handed out.
        kv_bytes_per_token: that the pool stores: keys, values and scales in all layers, and what smaller groups of
            layers leave empty.
        num_host_blocks: blocks that the host can keep of preempted sequences, its null block 0 included; 0: none.
        windows: of each layer group: the positions that its layers keep, as `SchedulerConfig.groups` takes them.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    num_host_blocks: int
    windows: tuple[int | None, ...]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copies whole blocks; int64 [num_pairs, 2], source and target."""
        ...

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Copies whole blocks to the host; int64 [num_pairs, 2], block of the cache and block of the host."""
        ...

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Copies whole blocks from the host; int64 [num_pairs, 2], block of the host and block of the cache."""
        ...

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Writes the KV of the step's tokens; returns float32 [num_logits, vocab_size].

        The caller may change the logits, and must be done with them before the next call.
        """
        ...


def check_runner(runner: object) -> None:
    """Sees whether an object has what a `Runner` has.

    Raises:
        ConfigError: it lacks an attribute or a method.
    """
    methods = ("copy_blocks", "swap_out", "swap_in", "forward")
    if missing := [name for name in (*Runner.__annotations__, *methods) if not hasattr(runner, name)]:
        refuse("runner", runner, f"an object with {', '.join(missing)}", ConfigError)


class ModelRunner:
    """A causal language model of transformers over a KV pool.

    Args:
        model: its weights' dtype need not be the pool's.
        pool: on the model's device.
        attention_backend: "auto", "torch", "cpu" or "triton".
        swap_pool: where the blocks of preempted sequences go: in host memory, like `pool` but for its number of blocks.
    """

    def __init__(
        self, model: CausalModel, pool: KvPool, attention_backend: str, swap_pool: KvPool | None = None
    ) -> None:
        self._model = model
        self._pool = pool
        self._swap_pool = swap_pool
        self._attention_backend = attention_backend
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.eos_token_ids = model.eos_token_ids
        self.dtype = model.dtype
        self.device = model.device
        self.num_blocks = pool.num_blocks
        self.block_size = pool.block_size
        group_bytes = pool.groups.block_bytes(pool.layout, pool.block_size, pool.format)
        self.kv_bytes_per_token = len(pool.groups.windows) * group_bytes // pool.block_size
        self.num_host_blocks = 0 if swap_pool is None else swap_pool.num_blocks
        self.windows = pool.groups.windows

    @property
    def pool(self) -> KvPool:
        """Its KV cache."""
        return self._pool

    @property
    def config(self) -> Any:
        """The config of transformers."""
        return self._model.config

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        self._pool.copy_blocks(pairs, self._attention_backend)

    def swap_out(self, pairs: torch.Tensor) -> None:
        self._pool.copy_blocks_to(self._host(), pairs, self._attention_backend)

    def swap_in(self, pairs: torch.Tensor) -> None:
        self._host().copy_blocks_to(self._pool, pairs, self._attention_backend)

    def _host(self) -> KvPool:
        if self._swap_pool is None:
            raise StepError("blocks are to be swapped, but the runner has no swap pool")
        return self._swap_pool

    def forward(self, step: StepTensors) -> torch.Tensor:
        context = StepContext(
            pool=self._pool,
            slot_mapping=step.slot_mapping,
            block_tables=step.block_tables,
            seq_lens=step.seq_lens,
            query_starts=step.query_starts,
            table_rows=step.table_rows,
            backend=self._attention_backend,
            share_prefixes=step.share_prefixes,
        )
        return self._model.forward(step.token_ids, step.positions, step.logits_indices, context)
