//! One step: what a plan decided.

use super::reserve::Reserve;
use super::sequence::{SeqIndex, Swapped};
use super::watch::Watched;
use crate::groups::Tables;
use crate::prefix::Announced;
use crate::states::StateCopy;
use crate::table::BlockCopy;
use crate::units::{RequestId, Row};

/// How many entries of the step's arrays a plan has filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Which step it is.
    pub id: u64,
    /// Tokens that the model computes.
    pub num_tokens: usize,
    /// Batch rows.
    pub num_batch_rows: usize,
    /// Batch rows of one token each that come first.
    pub num_decodes: usize,
    /// Batch rows that come next and check drafts: one known token and at least one draft each.
    pub num_draft_rows: usize,
    /// Tokens to sample.
    pub num_samples: usize,
    /// Blocks to copy to the host, before all other copies.
    pub num_swap_outs: usize,
    /// Blocks to copy from the host, before the copies within the device.
    pub num_swap_ins: usize,
    /// Blocks to copy before the model runs.
    pub num_copies: usize,
    /// States to copy before the model runs.
    pub num_state_restores: usize,
    /// States to copy after the model ran.
    pub num_state_saves: usize,
    /// Sequences that got a row.
    pub num_placed: usize,
}

/// One batch row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scheduled {
    pub(super) sequence: SeqIndex,
    pub(super) start: usize,
    pub(super) num_tokens: usize,
    pub(super) num_samples: usize,
}

impl Scheduled {
    /// Tokens of the sequence that are computed once the row is.
    pub(super) fn end(&self) -> usize {
        self.start + self.num_tokens
    }
}

/// A sequence that got a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) request: RequestId,
    pub(super) child: u32,
    pub(super) row: Row,
}

/// A node whose blocks the step fills and that others planned in the same step may share already.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) announced: Announced,
    pub(super) batch_row: usize,
}

/// What a plan decided. One value is used for every step, so that planning allocates nothing in the long run.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) id: u64,
    pub(super) watched: Watched,
    pub(super) rows: Vec<Scheduled>,
    pub(super) num_decodes: usize,
    pub(super) num_draft_rows: usize,
    pub(super) reserve: Reserve,
    /// Whether a running sequence may have more than one token to compute.
    pub(super) has_chunks: bool,
    pub(super) swap_outs: Vec<BlockCopy>,
    pub(super) swap_ins: Vec<BlockCopy>,
    /// The sequences that come back from the host, and the blocks there that are read.
    pub(super) swapped_in: Vec<(SeqIndex, Swapped)>,
    pub(super) copies: Vec<BlockCopy>,
    /// The sequence that each copy is for.
    pub(super) copied_for: Vec<SeqIndex>,
    pub(super) state_restores: Vec<StateCopy>,
    pub(super) state_saves: Vec<StateCopy>,
    /// Cached blocks that copies read: they stay what they are until the copies were made.
    pub(super) sources: Tables,
    pub(super) placed: Vec<Placed>,
    pub(super) announced: Vec<Filled>,
    /// For each row, once the step is over, whether it failed; empty: none did.
    failed: Vec<bool>,
    pub(super) num_tokens: usize,
    pub(super) num_samples: usize,
}

impl Step {
    pub(super) fn clear(&mut self, id: u64) {
        self.rows.clear();
        self.swap_outs.clear();
        self.swap_ins.clear();
        self.swapped_in.clear();
        self.copies.clear();
        self.copied_for.clear();
        self.state_restores.clear();
        self.state_saves.clear();
        self.sources.clear();
        self.placed.clear();
        self.announced.clear();
        self.failed.clear();
        (self.id, self.num_tokens, self.num_samples) = (id, 0, 0);
        (self.num_decodes, self.num_draft_rows) = (0, 0);
        self.has_chunks = false;
        self.reserve = Reserve::default();
    }

    pub(super) fn push(&mut self, row: Scheduled) {
        self.num_tokens += row.num_tokens;
        self.num_samples += row.num_samples;
        self.rows.push(row);
    }

    /// Notes which rows failed.
    pub(super) fn fail(&mut self, rows: impl ExactSizeIterator<Item = usize>) {
        if rows.len() > 0 {
            self.failed.resize(self.rows.len(), false);
            rows.for_each(|row| self.failed[row] = true);
        }
    }

    pub(super) fn has_failed(&self, row: usize) -> bool {
        self.failed.get(row).is_some_and(|&failed| failed)
    }

    /// The sequences of the rows that failed.
    pub(super) fn failed_sequences(&self) -> impl Iterator<Item = SeqIndex> {
        self.rows.iter().zip(&self.failed).filter(|(_, failed)| **failed).map(|(row, _)| row.sequence)
    }

    pub(super) fn plan(&self) -> Plan {
        Plan {
            id: self.id,
            num_tokens: self.num_tokens,
            num_batch_rows: self.rows.len(),
            num_decodes: self.num_decodes,
            num_draft_rows: self.num_draft_rows,
            num_samples: self.num_samples,
            num_swap_outs: self.swap_outs.len(),
            num_swap_ins: self.swap_ins.len(),
            num_copies: self.copies.len(),
            num_state_restores: self.state_restores.len(),
            num_state_saves: self.state_saves.len(),
            num_placed: self.placed.len(),
        }
    }
}
