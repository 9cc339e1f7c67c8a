//! The arrays of a step, which Python owns: any objects with writable, contiguous buffers of the right kind.

use std::sync::Mutex;

use pykv_core::scheduler::{PageLists, StepArrays, TableSync};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::convert::cells;

/// `kv_indptr`, `kv_indices` and `kv_last_page_len`.
type PageListBuffers = (PyBuffer<i32>, PyBuffer<i32>, PyBuffer<i32>);

/// The arrays that a plan fills, and what stands in the block tables already.
#[pyclass(frozen, module = "pykv._core")]
pub(crate) struct StepBuffers {
    token_ids: PyBuffer<i64>,
    token_sources: PyBuffer<i32>,
    positions: PyBuffer<i64>,
    slot_mapping: PyBuffer<i64>,
    query_starts: PyBuffer<i32>,
    seq_lens: PyBuffer<i32>,
    table_rows: PyBuffer<i32>,
    block_tables: PyBuffer<i32>,
    swap_out_pairs: PyBuffer<i64>,
    swap_in_pairs: PyBuffer<i64>,
    copy_pairs: PyBuffer<i64>,
    state_slots: PyBuffer<i32>,
    state_restore_pairs: PyBuffer<i64>,
    state_save_pairs: PyBuffer<i64>,
    sample_indices: PyBuffer<i64>,
    sample_rows: PyBuffer<i32>,
    sample_positions: PyBuffer<i64>,
    placed_requests: PyBuffer<i64>,
    placed_children: PyBuffer<i32>,
    placed_rows: PyBuffer<i32>,
    page_lists: Option<PageListBuffers>,
    pub(crate) finish_reasons: PyBuffer<u8>,
    pub(crate) sync: Mutex<TableSync>,
}

#[pymethods]
impl StepBuffers {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "one argument an array, named at the only call")]
    #[pyo3(signature = (*, token_ids, token_sources, positions, slot_mapping, query_starts, seq_lens, table_rows,
        block_tables, swap_out_pairs, swap_in_pairs, copy_pairs, state_slots, state_restore_pairs, state_save_pairs, sample_indices, sample_rows, sample_positions, placed_requests, placed_children,
        placed_rows, finish_reasons, page_lists=None))]
    fn new(
        token_ids: PyBuffer<i64>,
        token_sources: PyBuffer<i32>,
        positions: PyBuffer<i64>,
        slot_mapping: PyBuffer<i64>,
        query_starts: PyBuffer<i32>,
        seq_lens: PyBuffer<i32>,
        table_rows: PyBuffer<i32>,
        block_tables: PyBuffer<i32>,
        swap_out_pairs: PyBuffer<i64>,
        swap_in_pairs: PyBuffer<i64>,
        copy_pairs: PyBuffer<i64>,
        state_slots: PyBuffer<i32>,
        state_restore_pairs: PyBuffer<i64>,
        state_save_pairs: PyBuffer<i64>,
        sample_indices: PyBuffer<i64>,
        sample_rows: PyBuffer<i32>,
        sample_positions: PyBuffer<i64>,
        placed_requests: PyBuffer<i64>,
        placed_children: PyBuffer<i32>,
        placed_rows: PyBuffer<i32>,
        finish_reasons: PyBuffer<u8>,
        page_lists: Option<PageListBuffers>,
    ) -> Self {
        Self {
            token_ids,
            token_sources,
            positions,
            slot_mapping,
            query_starts,
            seq_lens,
            table_rows,
            block_tables,
            swap_out_pairs,
            swap_in_pairs,
            copy_pairs,
            state_slots,
            state_restore_pairs,
            state_save_pairs,
            sample_indices,
            sample_rows,
            sample_positions,
            placed_requests,
            placed_children,
            placed_rows,
            page_lists,
            finish_reasons,
            sync: Mutex::new(TableSync::default()),
        }
    }
}

impl StepBuffers {
    pub(crate) fn arrays<'py>(&'py self, py: Python<'py>) -> PyResult<StepArrays<'py>> {
        Ok(StepArrays {
            token_ids: cells(py, &self.token_ids, "token_ids")?,
            token_sources: cells(py, &self.token_sources, "token_sources")?,
            positions: cells(py, &self.positions, "positions")?,
            slot_mapping: cells(py, &self.slot_mapping, "slot_mapping")?,
            query_starts: cells(py, &self.query_starts, "query_starts")?,
            seq_lens: cells(py, &self.seq_lens, "seq_lens")?,
            table_rows: cells(py, &self.table_rows, "table_rows")?,
            block_tables: cells(py, &self.block_tables, "block_tables")?,
            swap_out_pairs: cells(py, &self.swap_out_pairs, "swap_out_pairs")?,
            swap_in_pairs: cells(py, &self.swap_in_pairs, "swap_in_pairs")?,
            copy_pairs: cells(py, &self.copy_pairs, "copy_pairs")?,
            state_slots: cells(py, &self.state_slots, "state_slots")?,
            state_restore_pairs: cells(py, &self.state_restore_pairs, "state_restore_pairs")?,
            state_save_pairs: cells(py, &self.state_save_pairs, "state_save_pairs")?,
            sample_indices: cells(py, &self.sample_indices, "sample_indices")?,
            sample_rows: cells(py, &self.sample_rows, "sample_rows")?,
            sample_positions: cells(py, &self.sample_positions, "sample_positions")?,
            placed_requests: cells(py, &self.placed_requests, "placed_requests")?,
            placed_children: cells(py, &self.placed_children, "placed_children")?,
            placed_rows: cells(py, &self.placed_rows, "placed_rows")?,
            page_lists: self.page_lists.as_ref().map(|lists| page_lists(py, lists)).transpose()?,
        })
    }
}

fn page_lists<'py>(py: Python<'py>, lists: &'py PageListBuffers) -> PyResult<PageLists<'py>> {
    Ok(PageLists {
        kv_indptr: cells(py, &lists.0, "kv_indptr")?,
        kv_indices: cells(py, &lists.1, "kv_indices")?,
        kv_last_page_len: cells(py, &lists.2, "kv_last_page_len")?,
    })
}
