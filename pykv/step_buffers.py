"""The host arrays of one step: allocated once, or brought by the caller, and filled by `Scheduler.plan`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pykv import _core
from pykv.errors import StepError
from pykv.field_checks import as_boolean, instance_of, refuse, shown
from pykv.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StepBuffers"]

_Layout: TypeAlias = dict[str, tuple[type[np.generic], tuple[int, ...]]]
_PAGE_LISTS = ("kv_indptr", "kv_indices", "kv_last_page_len")


class StepBuffers:
    """The host arrays of one step; `Scheduler.plan` fills their beginnings.

    Two of them, used in turn, let a step be read while the next one is planned; with `max_steps_in_flight` of 2, that
    one runs too. `block_tables` and `kv_indices` are
    written by change only: leave them as they are. The arrays may be wrapped (`torch.from_numpy`), and must not be
    resized.

    The page lists say the same as the block tables, as FlashInfer takes it. Their cost follows the blocks of the whole
    batch: each step writes the entries that have moved, which are those behind the first row that got a block.

    Args:
        config: of the scheduler that fills them.
        page_lists: whether plans fill `kv_indptr`, `kv_indices` and `kv_last_page_len` too; None otherwise.
            `Scheduler.plan` refuses lists that could pass 2**31 entries.
        arrays: memory of the caller's own to use, by attribute: numpy arrays, torch tensors on the CPU (pinned ones
            too), or whatever else gives numpy its memory without a copy. Their shapes and dtypes are those below.

    Attributes:
        token_ids, positions: int64 [max_num_batched_tokens].
        token_sources: int32 [max_num_seqs]; of each of the `num_decodes` first batch rows: which sample of the step
            before it the model takes as its token, instead of the one in `token_ids`; -1: that one. Always -1 unless
            `max_steps_in_flight` is 2.
        slot_mapping: int64 [max_num_batched_tokens]; slot = block_id * block_size + offset. With several layer groups
            [len(groups), max_num_batched_tokens].
        query_starts: int32 [max_num_seqs + 1]; batch row i computes tokens query_starts[i] to query_starts[i + 1].
        seq_lens: int32 [max_num_seqs]; tokens of batch row i whose K and V are there after this step.
        table_rows: int32 [max_num_seqs]; the row of block_tables that batch row i reads.
        block_tables: int32 [max_num_seqs, max_blocks_per_seq]; what lies beyond a sequence's length has no meaning, and
            the null block 0 stands for what left a window. With several layer groups [len(groups), ...].
        kv_indptr: int32 [max_num_seqs + 1]; batch row i reads the blocks kv_indices[kv_indptr[i] : kv_indptr[i + 1]].
        kv_indices: int32 [max_num_seqs * max_blocks_per_seq]; block ids, batch row after batch row, the null block 0
            for what left a window. With several layer groups [len(groups), ...].
        kv_last_page_len: int32 [max_num_seqs]; tokens in the last block of batch row i, 1 to block_size.
        swap_out_pairs: int64 [num_host_blocks, 2]; (device, host) blocks to copy first of all.
        swap_in_pairs: int64 [num_host_blocks, 2]; (host, device) blocks to copy next.
        copy_pairs: int64 [len(groups) * max_num_seqs, 2]; (source, target) blocks to copy then, in this order,
            before the model runs.
        state_slots: int32 [max_num_seqs]; the slot of the states that batch row i reads and overwrites. Empty where
            num_state_slots is 0, as the next two are.
        state_restore_pairs: int64 [max_num_seqs, 2]; (source, target) slots of states to copy before the model runs, in
            any order: of each sequence that starts, from its checkpoint or from slot 0, the initial state; and of one
            that a step which fails must not set back, from the slot that it worked in before.
        state_save_pairs: int64 [max_num_seqs, 2]; (source, target) slots of states to copy after the model ran, in any
            order: checkpoints, and the working slots of samples that are forked off.
        sample_indices: int64 [max_num_samples]; after which of the step's tokens each sample is drawn;
            max_num_samples = max_num_seqs * (1 + num_lookahead_tokens).
        sample_rows: int32 [max_num_samples]; the row of the sequence that gets the sample.
        sample_positions: int64 [max_num_samples]; the place in its sequence that the sampled token takes.
        placed_requests: int64, placed_children, placed_rows: int32 [max_num_seqs]; who got a row in this plan.
        finish_reasons: uint8 [max_num_samples]; filled by `Scheduler.apply`, a `FinishReason` a sample.

    Raises:
        StepError: an argument is not of its type; or one of `arrays` is unknown, is read-only, not contiguous, not
            aligned or a copy, overlaps another one, or has another shape or dtype.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        page_lists: bool = False,
        arrays: Mapping[str, object] | None = None,
    ) -> None:
        layout = _layout(instance_of("config", config, SchedulerConfig))
        if not isinstance(arrays, (Mapping, NoneType)):
            refuse("arrays", arrays, "a mapping of arrays by attribute", StepError)
        brought = dict(arrays or {})
        as_boolean("page_lists", page_lists, StepError)
        wanted = [name for name in layout if page_lists or name not in _PAGE_LISTS]
        if unknown := set(brought) - set(wanted):
            raise StepError(f"arrays has {shown(sorted(unknown, key=str))}: allowed are {', '.join(wanted)}")
        views: dict[str, NDArray[Any]] = {
            name: _checked(name, brought[name], *layout[name])
            if name in brought
            else np.zeros(layout[name][1], layout[name][0])
            for name in wanted
        }
        _check_apart(views)
        self.token_ids: NDArray[np.int64] = views["token_ids"]
        self.token_sources: NDArray[np.int32] = views["token_sources"]
        self.positions: NDArray[np.int64] = views["positions"]
        self.slot_mapping: NDArray[np.int64] = views["slot_mapping"]
        self.query_starts: NDArray[np.int32] = views["query_starts"]
        self.seq_lens: NDArray[np.int32] = views["seq_lens"]
        self.table_rows: NDArray[np.int32] = views["table_rows"]
        self.block_tables: NDArray[np.int32] = views["block_tables"]
        self.kv_indptr: NDArray[np.int32] | None = views.get("kv_indptr")
        self.kv_indices: NDArray[np.int32] | None = views.get("kv_indices")
        self.kv_last_page_len: NDArray[np.int32] | None = views.get("kv_last_page_len")
        self.swap_out_pairs: NDArray[np.int64] = views["swap_out_pairs"]
        self.swap_in_pairs: NDArray[np.int64] = views["swap_in_pairs"]
        self.copy_pairs: NDArray[np.int64] = views["copy_pairs"]
        self.state_slots: NDArray[np.int32] = views["state_slots"]
        self.state_restore_pairs: NDArray[np.int64] = views["state_restore_pairs"]
        self.state_save_pairs: NDArray[np.int64] = views["state_save_pairs"]
        self.sample_indices: NDArray[np.int64] = views["sample_indices"]
        self.sample_rows: NDArray[np.int32] = views["sample_rows"]
        self.sample_positions: NDArray[np.int64] = views["sample_positions"]
        self.placed_requests: NDArray[np.int64] = views["placed_requests"]
        self.placed_children: NDArray[np.int32] = views["placed_children"]
        self.placed_rows: NDArray[np.int32] = views["placed_rows"]
        self.finish_reasons: NDArray[np.uint8] = views["finish_reasons"]
        lists = [views.pop(name) for name in _PAGE_LISTS if page_lists]
        self._native = _core.StepBuffers(
            page_lists=(lists[0], lists[1], lists[2]) if page_lists else None,
            **views,
        )


def _layout(config: SchedulerConfig) -> _Layout:
    groups = () if len(config.groups) == 1 else (len(config.groups),)
    samples = config.max_num_seqs * (1 + config.num_lookahead_tokens)
    tokens, rows, blocks = config.max_num_batched_tokens, config.max_num_seqs, config.max_blocks_per_seq
    state_rows = rows if config.num_state_slots else 0
    return {
        "token_ids": (np.int64, (tokens,)),
        "token_sources": (np.int32, (rows,)),
        "positions": (np.int64, (tokens,)),
        "slot_mapping": (np.int64, (*groups, tokens)),
        "query_starts": (np.int32, (rows + 1,)),
        "seq_lens": (np.int32, (rows,)),
        "table_rows": (np.int32, (rows,)),
        "block_tables": (np.int32, (*groups, rows, blocks)),
        "kv_indptr": (np.int32, (rows + 1,)),
        "kv_indices": (np.int32, (*groups, rows * blocks)),
        "kv_last_page_len": (np.int32, (rows,)),
        "swap_out_pairs": (np.int64, (config.num_host_blocks, 2)),
        "swap_in_pairs": (np.int64, (config.num_host_blocks, 2)),
        "copy_pairs": (np.int64, (len(config.groups) * rows, 2)),
        "state_slots": (np.int32, (state_rows,)),
        "state_restore_pairs": (np.int64, (state_rows, 2)),
        "state_save_pairs": (np.int64, (state_rows, 2)),
        "sample_indices": (np.int64, (samples,)),
        "sample_rows": (np.int32, (samples,)),
        "sample_positions": (np.int64, (samples,)),
        "placed_requests": (np.int64, (rows,)),
        "placed_children": (np.int32, (rows,)),
        "placed_rows": (np.int32, (rows,)),
        "finish_reasons": (np.uint8, (samples,)),
    }


def _checked(name: str, array: object, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns the caller's own memory as an array of numpy's."""
    try:
        view, again = np.asarray(array), np.asarray(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise StepError(f"{name} gives numpy no memory on the host: {error}") from error
    if view.dtype != dtype or view.shape != shape:
        raise StepError(
            f"{name} is {view.dtype} {list(view.shape)}: needed is {np.dtype(dtype)} {list(shape)}"
        )
    if view.size and view.ctypes.data != again.ctypes.data:
        raise StepError(
            f"{name} is a {type(array).__name__} that numpy copies: needed is memory that it can share"
        )
    if not (view.flags.c_contiguous and view.flags.aligned and view.flags.writeable):
        raise StepError(f"{name} must be C-contiguous, aligned and writable")
    return view


def _check_apart(views: dict[str, NDArray[Any]]) -> None:
    placed = sorted((view.ctypes.data, view.nbytes, name) for name, view in views.items() if view.nbytes)
    for (start, size, name), (following, _, other) in itertools.pairwise(placed):
        if start + size > following:
            raise StepError(f"{name} and {other} overlap: each array needs memory of its own")
