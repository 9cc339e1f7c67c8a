//! Page lists: the blocks of all batch rows in one array, row after row, as FlashInfer takes them.
//!
//! They say the same as `table_rows`, `block_tables` and `seq_lens`, in a form whose cost follows the context: when a row
//! gets a block, all rows behind it move by one entry. What has not moved since the last plan is not written again, so
//! that a long sequence that decodes alone costs as little as a short one.

use std::cell::Cell;
use std::ops::Range;

use super::config::SchedulerConfig;
use super::sequence::Arena;
use super::step::Step;
use crate::error::{Error, Result};

/// Where a plan writes its page lists. Lengths are at least those of [`PageLists::check`].
#[derive(Clone, Copy)]
pub struct PageLists<'a> {
    /// Batch row `i` reads the blocks `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]`.
    pub kv_indptr: &'a [Cell<i32>],
    /// Block ids, batch row after batch row, the longest list's length for each layer group.
    pub kv_indices: &'a [Cell<i32>],
    /// Tokens in the last of each batch row's blocks: 1 to the block size.
    pub kv_last_page_len: &'a [Cell<i32>],
}

impl PageLists<'_> {
    /// Whether every array is long enough for any step under this configuration.
    ///
    /// # Errors
    /// [`Error::ArrayLength`] with the first that is not; [`Error::InvalidConfig`] if the longest list passes 2³¹ entries.
    pub fn check(&self, config: &SchedulerConfig) -> Result<()> {
        let (rows, indices) = (config.max_num_seqs, config.groups.len().saturating_mul(max_indices(config)));
        if i32::try_from(max_indices(config)).is_err() {
            let field = "max_num_seqs * max_blocks_per_seq";
            return Err(Error::config(field, max_indices(config), "at most 2147483647 with page lists"));
        }
        for (array, length, needed) in [
            ("kv_indptr", self.kv_indptr.len(), rows + 1),
            ("kv_indices", self.kv_indices.len(), indices),
            ("kv_last_page_len", self.kv_last_page_len.len(), rows),
        ] {
            if length < needed {
                return Err(Error::ArrayLength { array, length, needed });
            }
        }
        Ok(())
    }

    /// Writes the lists of a step.
    pub(super) fn write(
        &self,
        step: &Step,
        sequences: &Arena,
        config: &SchedulerConfig,
        sync: &mut PageSync,
    ) {
        let (size, num_groups) = (config.block_size, config.groups.len());
        let list_len = max_indices(config);
        let mut start = 0;
        self.kv_indptr[0].set(0);
        sync.runs.truncate(step.rows.len() * num_groups);
        for (batch_row, scheduled) in step.rows.iter().enumerate() {
            let sequence = &sequences[scheduled.sequence];
            let len = sequence.num_planned.div_ceil(size);
            for (group, table) in sequence.tables.iter().enumerate() {
                let lasting = sequence.num_lasting_blocks(table).min(len);
                let dropped = table.num_dropped().min(len);
                let run = Run { epoch: sequence.epoch, start, len, lasting, dropped };
                let cells = &self.kv_indices[group * list_len..][start..start + len];
                for places in sync.advance(batch_row * num_groups + group, run) {
                    let blocks = &table.blocks()[places.clone()];
                    cells[places].iter().zip(blocks).for_each(|(cell, block)| cell.set(block.get() as i32));
                }
            }
            start += len;
            self.kv_indptr[batch_row + 1].set(start as i32);
            self.kv_last_page_len[batch_row].set((sequence.num_planned - size * (len - 1)) as i32);
        }
    }
}

/// Page lists as plain vectors: for Rust callers and tests.
#[derive(Clone, Debug)]
pub struct OwnedPageLists {
    /// See [`PageLists::kv_indptr`].
    pub kv_indptr: Vec<i32>,
    /// See [`PageLists::kv_indices`].
    pub kv_indices: Vec<i32>,
    /// See [`PageLists::kv_last_page_len`].
    pub kv_last_page_len: Vec<i32>,
}

impl OwnedPageLists {
    /// Lists that fit any step under this configuration.
    pub fn new(config: &SchedulerConfig) -> Self {
        let rows = config.max_num_seqs;
        Self {
            kv_indptr: vec![0; rows + 1],
            kv_indices: vec![0; config.groups.len() * max_indices(config)],
            kv_last_page_len: vec![0; rows],
        }
    }

    /// The same memory, as a plan wants it.
    pub fn borrow(&mut self) -> PageLists<'_> {
        PageLists {
            kv_indptr: Cell::from_mut(self.kv_indptr.as_mut_slice()).as_slice_of_cells(),
            kv_indices: Cell::from_mut(self.kv_indices.as_mut_slice()).as_slice_of_cells(),
            kv_last_page_len: Cell::from_mut(self.kv_last_page_len.as_mut_slice()).as_slice_of_cells(),
        }
    }
}

/// Entries of a group's longest lists: every row with as many blocks as a sequence can have, shared ones in each.
fn max_indices(config: &SchedulerConfig) -> usize {
    config.max_num_seqs.saturating_mul(config.max_blocks_per_seq())
}

/// What stands in one caller's `kv_indices` since the last plan.
#[derive(Clone, Debug, Default)]
pub(super) struct PageSync {
    runs: Vec<Run>,
}

/// One batch row's blocks of one group in `kv_indices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    epoch: u64,
    start: usize,
    len: usize,
    /// Those of its blocks that stay whatever becomes of drafts.
    lasting: usize,
    /// Null blocks at its beginning.
    dropped: usize,
}

impl PageSync {
    pub(super) fn clear(&mut self) {
        self.runs.clear();
    }

    /// The entries of a run that must be written: those given back since, and the new ones. All count as written then.
    fn advance(&mut self, place: usize, run: Run) -> [Range<usize>; 2] {
        let Some(before) = self.runs.get_mut(place) else {
            self.runs.push(run);
            return [0..0, 0..run.len];
        };
        let before = std::mem::replace(before, run);
        if before.epoch != run.epoch || before.start != run.start {
            return [0..0, 0..run.len];
        }
        let known = before.lasting.min(run.len);
        [before.dropped.min(known)..run.dropped.min(known), known..run.len]
    }
}
