"""The arrays of a step: page lists on demand, and memory that the caller brings."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from pykv.errors import StepError
from pykv.scheduler import Scheduler, SchedulerConfig, StepBuffers

CONFIG = SchedulerConfig(
    num_blocks=32,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_model_len=64,
    enable_prefix_caching=False,
)


def fill(buffers: StepBuffers) -> int:
    scheduler = Scheduler(CONFIG)
    for length in (4, 5, 1):
        scheduler.submit(list(range(length)), max_tokens=1)
    plan = scheduler.plan(buffers)
    assert plan is not None
    return plan.num_batch_rows


def test_page_lists_say_the_same_as_the_block_tables() -> None:
    buffers = StepBuffers(CONFIG, page_lists=True)
    rows = fill(buffers)
    assert buffers.kv_indptr is not None
    assert buffers.kv_indices is not None
    assert buffers.kv_last_page_len is not None
    assert buffers.kv_indptr[: rows + 1].tolist() == [0, 1, 3, 4]
    assert buffers.kv_last_page_len[:rows].tolist() == [4, 1, 1]
    for row, count in enumerate((1, 2, 1)):
        start = buffers.kv_indptr[row]
        table = buffers.block_tables[buffers.table_rows[row], :count]
        assert buffers.kv_indices[start : start + count].tolist() == table.tolist()


def test_without_being_asked_for_there_are_no_page_lists() -> None:
    buffers = StepBuffers(CONFIG)
    fill(buffers)
    assert buffers.kv_indptr is buffers.kv_indices is buffers.kv_last_page_len is None


def test_a_plan_fills_memory_that_the_caller_brings() -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.zeros(32, dtype=torch.int64)
    memory = SharedMemory(create=True, size=4 * 8)
    try:
        lengths = np.frombuffer(memory.buf, np.int32, 8)
        starts = np.zeros(9, np.int32)
        buffers = StepBuffers(
            CONFIG, arrays={"token_ids": tokens, "seq_lens": lengths, "query_starts": memoryview(starts)}
        )
        fill(buffers)
        del buffers, lengths
        seen = bytes(memory.buf[:12])
    finally:
        memory.close()
        memory.unlink()
    assert tokens[:10].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0]
    assert np.frombuffer(seen, np.int32).tolist() == [4, 5, 1]
    assert starts[:4].tolist() == [0, 4, 9, 10]


def read_only() -> np.ndarray:
    array = np.zeros(8, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(8, np.int64), r"seq_lens is int64 \[8\]: needed is int32 \[8\]"),
        (np.zeros(7, np.int32), r"seq_lens is int32 \[7\]: needed is int32 \[8\]"),
        (np.zeros((8, 1), np.int32), r"seq_lens is int32 \[8, 1\]: needed is int32 \[8\]"),
        (np.zeros(16, np.int32)[::2], "seq_lens must be C-contiguous, aligned and writable"),
        (read_only(), "seq_lens must be C-contiguous, aligned and writable"),
        (bytearray(32), r"seq_lens is "),
        ([0] * 8, "seq_lens is "),
        (None, "seq_lens is "),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(array: object, message: str) -> None:
    with pytest.raises(StepError, match=message):
        StepBuffers(CONFIG, arrays={"seq_lens": array})


def test_memory_that_numpy_would_copy_is_refused() -> None:
    class Copies:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.zeros(8, np.int32)

    with pytest.raises(StepError, match="seq_lens is a Copies that numpy copies"):
        StepBuffers(CONFIG, arrays={"seq_lens": Copies()})


def test_arrays_that_overlap_are_refused_by_name() -> None:
    memory = np.zeros(15, np.int32)
    with pytest.raises(StepError, match="seq_lens and table_rows overlap"):
        StepBuffers(CONFIG, arrays={"seq_lens": memory[:8], "table_rows": memory[7:]})


@pytest.mark.parametrize("name", ["tokens", "kv_indices"])
def test_an_array_that_is_not_asked_for_is_refused_by_name(name: str) -> None:
    with pytest.raises(StepError, match=rf"arrays has \['{name}'\]: allowed are token_ids"):
        StepBuffers(CONFIG, arrays={name: np.zeros(8, np.int32)})
