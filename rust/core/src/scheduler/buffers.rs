//! The arrays of one step: the caller owns them, a plan fills their beginnings.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use super::config::SchedulerConfig;
use super::pages::{OwnedPageLists, PageLists, PageSync};
use super::step::Plan;
use super::watch::Watch;
use crate::error::{Error, Result};

impl StepArrays<'_> {
    /// Visits everything that a plan has filled but the block tables, which are written by change, and the page lists,
    /// which say the same.
    pub(crate) fn visit_filled(&self, plan: &Plan, config: &SchedulerConfig, mut visit: impl FnMut(i64)) {
        let (rows, samples, placed) = (plan.num_batch_rows, plan.num_samples, plan.num_placed);
        let long = [
            (self.token_ids, plan.num_tokens),
            (self.positions, plan.num_tokens),
            (self.swap_out_pairs, 2 * plan.num_swap_outs),
            (self.swap_in_pairs, 2 * plan.num_swap_ins),
            (self.copy_pairs, 2 * plan.num_copies),
            (self.state_restore_pairs, 2 * plan.num_state_restores),
            (self.state_save_pairs, 2 * plan.num_state_saves),
            (self.sample_indices, samples),
            (self.sample_positions, samples),
            (self.placed_requests, placed),
        ];
        let short = [
            (self.query_starts, rows + 1),
            (self.seq_lens, rows),
            (self.table_rows, rows),
            (self.state_slots, if config.has_states() { rows } else { 0 }),
            (self.sample_rows, samples),
            (self.placed_children, placed),
            (self.placed_rows, placed),
        ];
        for slots in self.slot_mapping.chunks(config.max_num_batched_tokens).take(config.groups.len()) {
            slots[..plan.num_tokens].iter().for_each(|cell| visit(cell.get()));
        }
        long.iter().for_each(|(cells, filled)| cells[..*filled].iter().for_each(|cell| visit(cell.get())));
        let overlaps = config.max_steps_in_flight > 1;
        let sources = if overlaps { &self.token_sources[..plan.num_decodes] } else { &[] };
        sources.iter().for_each(|cell| visit(cell.get().into()));
        short
            .iter()
            .for_each(|(cells, filled)| cells[..*filled].iter().for_each(|cell| visit(cell.get().into())));
    }
}

macro_rules! step_arrays {
    ($($(#[$doc:meta])* $name:ident: $kind:ty, $length:expr;)*) => {
        /// Where a plan is written. Lengths are at least those of [`StepArrays::check`].
        #[derive(Clone, Copy)]
        pub struct StepArrays<'a> {
            $($(#[$doc])* pub $name: &'a [Cell<$kind>],)*
            /// The block tables once more, as page lists, for who asks for them.
            pub page_lists: Option<PageLists<'a>>,
        }

        impl StepArrays<'_> {
            /// Whether every array is long enough for any step under this configuration.
            ///
            /// # Errors
            /// [`Error::ArrayLength`] with the first that is not.
            pub fn check(&self, config: &SchedulerConfig) -> Result<()> {
                $(check_length(stringify!($name), self.$name.len(), $length(config))?;)*
                // Rows stand one after the other: with other columns they would lie elsewhere.
                let (array, length, needed) = ("block_tables", self.block_tables.len(), table(config));
                if length != needed {
                    return Err(Error::ArrayLength { array, length, needed });
                }
                self.page_lists.map_or(Ok(()), |lists| lists.check(config))
            }
        }

        /// The arrays of a step as plain vectors: for Rust callers and tests.
        #[derive(Clone, Debug)]
        pub struct OwnedArrays {
            $($(#[$doc])* pub $name: Vec<$kind>,)*
            /// The block tables once more, as page lists, for who asks for them.
            pub page_lists: Option<OwnedPageLists>,
        }

        impl OwnedArrays {
            /// Arrays that fit any step under this configuration.
            pub fn new(config: &SchedulerConfig) -> Self {
                Self { $($name: vec![0; $length(config)],)* page_lists: None }
            }

            /// The same with page lists.
            pub fn with_page_lists(config: &SchedulerConfig) -> Self {
                Self { page_lists: Some(OwnedPageLists::new(config)), ..Self::new(config) }
            }

            /// The same memory, as a plan wants it.
            pub fn borrow(&mut self) -> StepArrays<'_> {
                StepArrays {
                    $($name: Cell::from_mut(self.$name.as_mut_slice()).as_slice_of_cells(),)*
                    page_lists: self.page_lists.as_mut().map(OwnedPageLists::borrow),
                }
            }
        }
    };
}

step_arrays! {
    /// The step's tokens, batch row after batch row.
    token_ids: i64, tokens;
    /// Of each decode: which sample of the step before it the model computes in the place of its token; -1: the token is
    /// known.
    token_sources: i32, rows;
    /// Each token's place in its sequence.
    positions: i64, tokens;
    /// Where each token's K and V go, `max_num_batched_tokens` for each layer group.
    slot_mapping: i64, group_tokens;
    /// Batch row `i` computes the tokens `query_starts[i]..query_starts[i + 1]`.
    query_starts: i32, rows_and_one;
    /// The tokens of batch row `i`'s sequence whose K and V are there after this step.
    seq_lens: i32, rows;
    /// The row of `block_tables` that batch row `i` reads.
    table_rows: i32, rows;
    /// Block ids by layer group and row, `max_blocks_per_seq` columns; only what changed is written.
    block_tables: i32, table;
    /// (device block, host block) of each block that is copied out, before all other copies.
    swap_out_pairs: i64, host_pairs;
    /// (host block, device block) of each block that is copied in, before `copy_pairs`.
    swap_in_pairs: i64, host_pairs;
    /// (source, target) of each block that is copied before the model runs, in this order.
    copy_pairs: i64, pairs;
    /// The slot of the states that batch row `i` reads and overwrites, in models with states.
    state_slots: i32, state_rows;
    /// (source, target) slot of each copy of states before the model runs, in any order.
    state_restore_pairs: i64, state_pairs;
    /// (source, target) slot of each copy of states after the model ran, in any order.
    state_save_pairs: i64, state_pairs;
    /// Which of the step's tokens each sample is drawn after.
    sample_indices: i64, samples;
    /// The row of the sequence that gets the sample.
    sample_rows: i32, samples;
    /// The place in its sequence that the sampled token takes.
    sample_positions: i64, samples;
    /// The request of each sequence that got a row in this plan.
    placed_requests: i64, rows;
    /// Which sample of its request it is.
    placed_children: i32, rows;
    /// The row that it got.
    placed_rows: i32, rows;
}

fn tokens(config: &SchedulerConfig) -> usize {
    config.max_num_batched_tokens
}

fn group_tokens(config: &SchedulerConfig) -> usize {
    config.groups.len() * config.max_num_batched_tokens
}

fn rows(config: &SchedulerConfig) -> usize {
    config.max_num_seqs
}

/// A sample a row, and one more for each draft.
fn samples(config: &SchedulerConfig) -> usize {
    config.max_num_seqs * (1 + config.num_lookahead_tokens)
}

fn rows_and_one(config: &SchedulerConfig) -> usize {
    config.max_num_seqs + 1
}

fn pairs(config: &SchedulerConfig) -> usize {
    2 * config.groups.len() * config.max_num_seqs
}

fn host_pairs(config: &SchedulerConfig) -> usize {
    2 * config.num_host_blocks
}

/// A working slot a row.
fn state_rows(config: &SchedulerConfig) -> usize {
    if config.has_states() { config.max_num_seqs } else { 0 }
}

/// A batch row restores and saves once, and the rows of samples that are forked off are no batch rows yet.
fn state_pairs(config: &SchedulerConfig) -> usize {
    2 * state_rows(config)
}

fn table(config: &SchedulerConfig) -> usize {
    config.groups.len() * config.max_num_seqs * config.max_blocks_per_seq()
}

fn check_length(array: &'static str, length: usize, needed: usize) -> Result<()> {
    if length < needed { Err(Error::ArrayLength { array, length, needed }) } else { Ok(()) }
}

/// What stands in one caller's `block_tables` and `kv_indices`: a plan writes only what is new to them.
#[derive(Clone, Debug, Default)]
pub struct TableSync {
    rows: Vec<Synced>,
    pub(super) pages: PageSync,
    /// Whose tables stand there, and the last plan that was written.
    owner: Option<(Identity, Watch)>,
}

/// One scheduler, and no other one.
#[derive(Clone, Debug, Default)]
pub(super) struct Identity(Arc<()>);

#[derive(Clone, Copy, Debug, Default)]
struct Synced {
    epoch: u64,
    len: usize,
    dropped: usize,
}

impl TableSync {
    /// The plan that stands there and is in flight, whichever scheduler's it is.
    pub(super) fn plan_in_flight(&self) -> Option<u64> {
        self.owner.as_ref().and_then(|(_, plan)| plan.plan_in_flight())
    }

    /// Whether a scheduler was the last to write there.
    pub(super) fn is_of(&self, owner: &Identity) -> bool {
        self.owner.as_ref().is_some_and(|(other, _)| Arc::ptr_eq(&other.0, &owner.0))
    }

    /// Forgets what stands there if it was not written by this scheduler, whose tables have so many rows. Notes the plan
    /// that is written now.
    pub(super) fn claim(&mut self, owner: &Identity, num_rows: usize, plan: Watch) {
        if let Some((other, last)) = &mut self.owner
            && Arc::ptr_eq(&other.0, &owner.0)
        {
            *last = plan;
            return;
        }
        self.rows.clear();
        self.rows.resize(num_rows, Synced::default());
        self.pages.clear();
        self.owner = Some((owner.clone(), plan));
    }

    /// The entries of a row that must be written, given the table's epoch: those given back since, and the new ones. All
    /// up to `lasting` count as written then, and stay what they are for as long as the epoch does.
    pub(super) fn advance(
        &mut self,
        row: usize,
        epoch: u64,
        len: usize,
        lasting: usize,
        dropped: usize,
    ) -> (Range<usize>, Range<usize>) {
        let before = std::mem::replace(&mut self.rows[row], Synced { epoch, len: lasting, dropped });
        if before.epoch != epoch {
            return (0..0, 0..len);
        }
        let known = before.len.min(len);
        (before.dropped.min(known)..dropped.min(known), known..len)
    }
}
