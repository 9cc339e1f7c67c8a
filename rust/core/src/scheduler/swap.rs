//! Preemption: what becomes of a victim's blocks, and how it gets them back.
//!
//! Within a step the copies are done in this order, before the model runs: out of the device, into the device, block
//! copies. So a block that a victim gave up can be filled in the same step, and a host block is free again only when the
//! step that reads it was applied.

use super::Scheduler;
use super::sequence::{SeqIndex, Swapped};
use super::step::Step;
use crate::error::Result;
use crate::groups::Tables;
use crate::policy::preemption::{Costs, Loss, swaps};
use crate::table::{BlockCopy, BlockTable};

impl Scheduler {
    /// Tells what was measured: `auto` preemption chooses by it.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`](crate::Error::InvalidConfig) if one of them is no time; nothing was changed.
    pub fn set_costs(&mut self, costs: Costs) -> Result<()> {
        costs.validate()?;
        self.costs = costs;
        Ok(())
    }

    /// Takes a sequence off the device while a step is planned; it starts again later, from the host's copy if one could
    /// be made. If nothing of it was computed, because failed steps took its start back, it waits as if it had never started.
    /// The caller takes it out of `running`.
    pub(super) fn preempt(&mut self, step: &mut Step, index: SeqIndex) {
        step.reserve.nobody_starts();
        if !self.sequences[index].has_computed {
            return self.preempt_without_copy(index);
        }
        let swapped = self.swap_out(step, index);
        self.preempt_without_copy(index);
        self.sequences[index].swapped = swapped;
        self.totals.preemptions += 1;
        self.request_of(index).preemptions += 1;
    }

    /// Takes a sequence off the device whose blocks cannot be copied: what it computed is lost. A failed step does that
    /// too, which is no preemption. The caller takes it out of `running`.
    pub(super) fn preempt_without_copy(&mut self, index: SeqIndex) {
        self.note_held(index);
        self.stop_running(index);
        let sequence = &mut self.sequences[index];
        sequence.stalled_since = sequence.has_computed.then_some(self.now);
        if !sequence.has_computed {
            let request = sequence.key.request;
            self.resume_deadline(request);
        }
        self.enqueue(index);
    }

    /// What a sequence found and held counts as computed again when it has to be, though another one computed it first. What
    /// it was to share with a step that failed, or that is not over, it never held; nor what a start found that a failed step
    /// took back.
    fn note_held(&mut self, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        if sequence.has_computed && !sequence.is_void && !self.cache.awaits_step(sequence.cursor) {
            sequence.high_water = sequence.high_water.max(sequence.num_computed);
        }
    }

    fn swap_out(&mut self, step: &mut Step, index: SeqIndex) -> Option<Swapped> {
        let host = self.host.as_ref()?;
        let sequence = &self.sequences[index];
        let (num_tokens, cursor) = (sequence.num_computed, sequence.cursor);
        // Lookahead aside, a table's last blocks may hold nothing yet.
        let filled = self.block_size.blocks_for(num_tokens);
        let num_blocks = sequence.tables.iter().map(|table| filled - table.num_dropped().min(filled)).sum();
        let loss = Loss { num_tokens, num_blocks, free_host_blocks: host.num_free() };
        if !swaps(self.config.preemption, self.costs, loss) {
            return None;
        }
        let mut tables = Tables::new();
        for table in &sequence.tables {
            let mut copy = BlockTable::starting_at(host, table.num_dropped().min(filled));
            copy.extend(filled - copy.len()).ok()?;
            tables.push(copy);
        }
        for (from, to) in sequence.tables.iter().zip(&tables) {
            let pairs = from.held().iter().zip(to.held());
            step.swap_outs.extend(pairs.map(|(&source, &target)| BlockCopy { source, target }));
        }
        self.totals.swapped_out_blocks += num_blocks as u64;
        self.request_of(index).swapped_blocks += num_blocks;
        Some(Swapped { tables, num_tokens, cursor, step: step.id })
    }

    /// Has a starting sequence's blocks filled from the host's copy, those that it did not find in the cache.
    pub(super) fn swap_in(&mut self, step: &mut Step, index: SeqIndex) {
        let sequence = &mut self.sequences[index];
        let Some(swapped) = sequence.swapped.take() else { return };
        if swapped.num_tokens <= sequence.num_computed {
            return;
        }
        let before = step.swap_ins.len();
        for (from, to) in swapped.tables.iter().zip(&sequence.tables) {
            let found = sequence.cursor.published.max(to.num_dropped());
            let pairs = from.blocks().iter().zip(to.blocks()).skip(found);
            step.swap_ins.extend(pairs.map(|(&source, &target)| BlockCopy { source, target }));
        }
        self.totals.swapped_in_blocks += (step.swap_ins.len() - before) as u64;
        (sequence.num_computed, sequence.num_planned) = (swapped.num_tokens, swapped.num_tokens);
        step.swapped_in.push((index, swapped));
    }

    /// Gives up the copies to the host of a step that is not run.
    pub(super) fn forget_swap_outs(&mut self, step: &Step) {
        if step.swap_outs.is_empty() {
            return;
        }
        for index in self.waiting.values().copied().chain(self.paused.iter()) {
            let sequence = &mut self.sequences[index];
            if sequence.swapped.as_ref().is_some_and(|swapped| swapped.step == step.id) {
                sequence.swapped = None;
            }
        }
    }

    /// Takes back the copies of a step that failed: copies to the host are worth nothing, those from it are still there.
    pub(super) fn discard_swaps(&mut self, step: &mut Step) {
        for (index, swapped) in step.swapped_in.drain(..) {
            self.preempt_without_copy(index);
            self.sequences[index].swapped = Some(swapped);
        }
        self.forget_swap_outs(step);
    }
}
