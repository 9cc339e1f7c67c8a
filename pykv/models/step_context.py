"""What one step hands to the attention layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pykv.attention.backends import Backend, backend_for
from pykv.attention.codec_kernels import CodecKernels
from pykv.kv_format import CodecFormat
from pykv.kv_pool import CACHE_DTYPES, KvPool

__all__ = ["StepContext"]


@dataclass
class StepContext:
    """Where each token of one packed step writes its KV, and what each batch row reads.

    The contents of the index tensors are trusted: they come from the scheduler, and are not checked again in
    each layer.

    Attributes:
        pool: the KV pool that is written and read.
        slot_mapping: int64 [num_tokens]; slot = block_id * block_size + offset; -1 writes nothing. Where the pool has
            several layer groups: [num_groups, num_tokens].
        block_tables: int32 [num_table_rows, max_blocks_per_seq], or [num_groups, ...].
        seq_lens: int32 [num_batch_rows], the length of each sequence with this step's tokens.
        query_starts: int32 [num_batch_rows + 1]; batch row i computes the tokens [starts[i], starts[i + 1]).
        table_rows: int32 [num_batch_rows], the table row of each batch row; None: row i.
        backend: "auto", "torch", "cpu" or "triton"; the format of the pool may bring its own.
        share_prefixes: whether rows may begin alike, so that backends that read such keys once may look for them.
        num_attention_calls: how many attention layers have run with this context.
    """

    pool: KvPool
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    table_rows: Tensor | None = None
    backend: str = "auto"
    share_prefixes: bool = True
    num_attention_calls: int = field(init=False, default=0)
    _kernels: Backend = field(init=False, repr=False)
    _options: dict[str, bool] = field(init=False, repr=False, default_factory=dict)
    _slots: tuple[Tensor, ...] = field(init=False, repr=False)
    _tables: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_groups = len(self.pool.groups.windows)
        self._slots = _by_group(self.slot_mapping, 1, num_groups)
        self._tables = _by_group(self.block_tables, 2, num_groups)
        form = self.pool.format
        if isinstance(form, CodecFormat):
            self._kernels = CodecKernels(form)
        else:
            loaded = backend_for(self.backend, self.pool.device, self.pool.dtype)
            self._kernels = loaded.functions
            if loaded.shares_prefixes and not self.share_prefixes:
                self._options["share_prefixes"] = False

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Writes the step's keys and values of one layer to the pool, then attends to each sequence's own.

        The writes come first: a token sees itself, and tokens of the same step see those before them. A layer
        that reads another's keys and values writes nothing.

        Args:
            layer: its index in the pool's layout.
            query: [num_tokens, num_heads, head_dim_k]; last dimension contiguous, as in key and value.
            key, value: [num_tokens, num_kv_heads, head_dim_k or _v].
            scale, window, softcap, sinks: as in `pykv.paged_attention`; sinks are float32.

        Returns:
            [num_tokens, num_heads, head_dim_v].
        """
        pool, group = self.pool, self.pool.groups.group_of[layer]
        key_cache, value_cache, scales = (
            pool.key_caches[layer],
            pool.value_caches[layer],
            pool.kv_scales[layer],
        )
        extras = {} if scales is None else {"kv_scales": scales}
        wanted = query.dtype
        if (
            pool.dtype in CACHE_DTYPES
        ):  # kernels want one type of floats; nothing is done where it is one already
            query, key, value = query.to(pool.dtype), key.to(pool.dtype), value.to(pool.dtype)
        if pool.layout.layers[layer].reads_layer is None:
            self._kernels.write_kv(key, value, key_cache, value_cache, self._slots[group], **extras)
        self.num_attention_calls += 1
        output = self._kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=self._tables[group],
            seq_lens=self.seq_lens,
            query_starts=self.query_starts,
            table_rows=self.table_rows,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=query.new_empty((query.shape[0], query.shape[1], value.shape[2])),
            **extras,
            **self._options,
        )
        return output.to(wanted)


def _by_group(tensor: Tensor, num_dimensions: int, num_groups: int) -> tuple[Tensor, ...]:
    """The part of each group; without a dimension for groups, all have the same."""
    return (tensor,) * num_groups if tensor.dim() == num_dimensions else tensor.unbind()
