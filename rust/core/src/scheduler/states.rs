//! States of fixed size, for models that have some: which slot a sequence works in, and the copies of a step.
//!
//! ```text
//! before the model runs   checkpoint, or slot 0 ──▶ working slot      of each sequence that starts in this step
//!                         working slot ──▶ another working slot       of the first that runs, if it is guarded
//! the model runs          working slots are read and overwritten
//! after it                working slot ──▶ checkpoint                 where the chunk ends at a place for one
//!                         working slot ──▶ working slot               of each sample that is forked off
//! ```
//! A state that a step has touched cannot be brought back: when a step fails as a whole, its sequences start again from
//! their last checkpoint. For the same reason states are not swapped, no draft is checked, and twins do not share what one
//! of them is just computing.
//!
//! Who was set back once is *guarded*: as long as it is the first that runs, its steps leave its state where it is and
//! work on a copy in a spare slot. So the first gets on with every step that does not fail, and in turn everybody ends:
//! `docs/core.md` has the argument.

use super::Scheduler;
use super::config::SchedulerConfig;
use super::ranks::Relief;
use super::sequence::{SeqIndex, SeqKey, Sequence};
use super::sequence_states::SequenceStates;
use super::step::Step;
use crate::error::{Error, Result};
use crate::policy::checkpoint::{chunk_end, takes_checkpoint};
use crate::states::{StateArena, StateCopy, StateSlot};

impl SchedulerConfig {
    /// Whether sequences have states.
    pub fn has_states(&self) -> bool {
        self.num_state_slots > 0
    }

    /// Tokens from one place for a checkpoint to the next.
    fn checkpoint_tokens(&self) -> usize {
        self.checkpoint_every.saturating_mul(self.block_size)
    }

    /// Whether a scheduler can keep what the other options promise for a model with states.
    pub(super) fn validate_states(&self) -> Result<()> {
        if !self.has_states() {
            return Ok(());
        }
        if self.num_state_slots < 3 {
            let allowed =
                "0, or at least 3: the initial state, a slot to work in and one to start again from";
            return Err(Error::config("num_state_slots", self.num_state_slots, allowed));
        }
        for (field, value, why) in [
            ("num_host_blocks", self.num_host_blocks, "states are not swapped, they are computed again"),
            (
                "num_lookahead_tokens",
                self.num_lookahead_tokens,
                "a state cannot be cut back to before a draft",
            ),
            ("max_pinned_blocks", self.pin_quota.blocks, "checkpoints are not pinned"),
            ("partial_block_reuse", self.partial_block_reuse, "there is no state inside a block"),
        ] {
            if value > 0 {
                return Err(Error::config(field, value, format!("0 with num_state_slots: {why}")));
            }
        }
        if self.max_steps_in_flight > 1 {
            let allowed = "1 with num_state_slots: a step overwrites the states that the one before it gave";
            return Err(Error::config("max_steps_in_flight", self.max_steps_in_flight, allowed));
        }
        Ok(())
    }
}

impl Scheduler {
    /// The slots of the states, if the model has some.
    pub fn state_arena(&self) -> Option<&StateArena> {
        self.cache.state_arena()
    }

    /// Whether a waiting sequence can have a slot for each of its samples, besides the checkpoint that it would read, and
    /// the first that runs still the one that it needs if it is guarded: the one that runs first now, which takes it in
    /// this very step, as well as the one that starts, where that comes before it.
    pub(super) fn slots_fit(&self, index: SeqIndex, relief: Relief, keeps_checkpoint: bool) -> bool {
        let Some(arena) = self.state_arena() else { return true };
        let starting = &self.sequences[index];
        let first = self.running[..self.running.len() - relief.sequences].first();
        let first = first.map(|&first| &self.sequences[first]);
        let needs_spare = first.is_some_and(|first| first.is_guarded && first.states.before.is_none());
        let comes_first = first.is_none_or(|first| starting.key < first.key);
        // The checkpoint that it reads can be had when it has been read.
        let will_need_spare = comes_first && starting.is_guarded && !keeps_checkpoint;
        let spare = usize::from(needs_spare || will_need_spare);
        let needed = starting.num_samples + usize::from(keeps_checkpoint) + spare;
        arena.available() + relief.rows >= needed
    }

    /// Sees to it that a slot can be had for the first that runs if it is guarded, if need be by having others give way.
    pub(super) fn make_spare_slot(&mut self, step: &mut Step) {
        let Some(&first) = self.running.first() else { return };
        while self.sequences[first].is_guarded
            && self.state_arena().is_some_and(|arena| arena.available() == 0)
        {
            if self.preempt_paused(step) {
                continue;
            }
            // It can have a slot more than it has samples: alone, it is not left without.
            let Some(last) = self.running.pop_if(|&mut last| last != first) else { return };
            self.preempt(step, last);
        }
    }

    /// Has the step at hand leave the state of the first that runs where it is and work on a copy, if a failed step has
    /// taken it before: no other step that fails does.
    pub(super) fn guard_first(&mut self, step: &mut Step) {
        let Some(&index) = self.running.first() else { return };
        let sequence = &mut self.sequences[index];
        if !sequence.is_guarded || !sequence.is_in_flight() {
            return;
        }
        let Some(target) = self.cache.take_working() else { return };
        let states = &mut sequence.states;
        let source = std::mem::replace(&mut states.working[0], target);
        states.before = Some(source);
        step.state_restores.push(StateCopy { source, target });
    }

    /// Gives a sequence back the state that a failed step has left where it was. Returns whether there is one.
    pub(super) fn restore_state(&mut self, index: SeqIndex) -> bool {
        let states = &mut self.sequences[index].states;
        let Some(before) = states.before.take() else { return false };
        let spoiled = std::mem::replace(&mut states.working[0], before);
        let fills = states.fills.take();
        fills.into_iter().chain([spoiled]).for_each(|slot| self.cache.give_back_state(slot));
        true
    }

    /// How long a chunk of so many tokens from `start` on is when it ends where a checkpoint can be taken.
    pub(super) fn cut_chunk(&self, start: usize, num_tokens: usize, parting: usize) -> usize {
        if !self.takes_checkpoints() || num_tokens == 0 {
            return num_tokens;
        }
        chunk_end(start, start + num_tokens, self.config.checkpoint_tokens(), parting) - start
    }

    /// Where a sequence that starts with `hits` blocks parts from what is cached, if `known` of its blocks are; else 0.
    pub(super) fn parting(&self, sequence: &Sequence, hits: usize, known: usize) -> usize {
        let is_further = sequence.reuse_cached && known > hits;
        if is_further { self.block_size.tokens() * known } else { 0 }
    }

    /// Gives a starting sequence a slot for each of its rows, the first filled from what its hit landed on. Comes right
    /// after the lookup.
    pub(super) fn start_states(&mut self, step: &mut Step, index: SeqIndex) {
        if !self.cache.has_states() {
            return;
        }
        let sequence = &self.sequences[index];
        let parting = self.parting(sequence, sequence.cursor.published, self.cache.num_known());
        let sequence = &mut self.sequences[index];
        // Held before slots are taken: those may be had by evicting a checkpoint.
        let source = self.cache.begin_read(sequence.cursor);
        let taken =
            (0..sequence.num_samples).map(|_| self.cache.take_working().expect("admission saw enough slots"));
        let states = &mut sequence.states;
        states.working.extend(taken);
        states.reads = Some(source);
        states.parting = parting;
        step.state_restores.push(StateCopy { source, target: states.working[0] });
        self.come_home(index);
    }

    /// A sequence would start again from the checkpoint at its last published block.
    fn come_home(&mut self, index: SeqIndex) {
        let Sequence { key, cursor, .. } = self.sequences[index];
        let before = self.homes.get(&key).copied();
        if let Some(home) = self.cache.hold_checkpoint(cursor, before) {
            self.homes.insert(key, home);
        } else if before.is_some() {
            self.homes.remove(&key);
        }
    }

    /// A sequence is over.
    pub(super) fn leave_home(&mut self, key: SeqKey) {
        if let Some(home) = self.homes.remove(&key) {
            self.cache.release_checkpoint(home);
        }
    }

    /// Plans what is copied from the working slots when the step is computed. Comes last: a checkpoint takes no slot from a
    /// sequence that starts.
    pub(super) fn plan_state_saves(&mut self, step: &mut Step) {
        if !self.cache.has_states() {
            return;
        }
        let takes_checkpoints = self.takes_checkpoints();
        let mut takers = std::mem::take(&mut self.checkpointed);
        takers.clear();
        for row in &step.rows {
            let sequence = &self.sequences[row.sequence];
            let source = sequence.states.working[0];
            let interval = self.config.checkpoint_tokens();
            let forks = sequence.states.working.iter().take(row.num_samples).skip(1);
            step.state_saves.extend(forks.map(|&target| StateCopy { source, target }));
            if takes_checkpoints && takes_checkpoint(sequence.num_planned, interval, sequence.states.parting)
            {
                takers.push(row.sequence);
            }
        }
        takers.sort_unstable_by_key(|&index| self.sequences[index].key);
        for &index in &takers {
            let cursor = self.sequences[index].cursor;
            let fills = self.cache.begin_checkpoint(cursor);
            let states = &mut self.sequences[index].states;
            states.fills = fills;
            let source = states.working[0];
            step.state_saves.extend(fills.map(|target| StateCopy { source, target }));
        }
        self.checkpointed = takers;
    }

    /// A sequence's step was computed and its blocks are published: the checkpoint that was copied is there.
    pub(super) fn states_computed(&mut self, index: SeqIndex) {
        if !self.cache.has_states() {
            return;
        }
        let sequence = &mut self.sequences[index];
        let num_blocks = self.block_size.full_blocks(sequence.num_computed);
        if let Some(slot) = sequence.states.reads.take() {
            self.cache.end_read(slot);
        }
        if let Some(slot) = sequence.states.before.take() {
            self.cache.give_back_state(slot);
        }
        if let Some(slot) = sequence.states.fills.take() {
            self.cache.finish_checkpoint(slot, sequence.cursor, num_blocks);
            if self.cache.goes_on(sequence.cursor) && sequence.cursor.published == num_blocks {
                self.come_home(index);
            }
        }
    }

    /// Takes everything of the arena from a sequence that stops running.
    pub(super) fn give_back_states(&mut self, index: SeqIndex) {
        if !self.cache.has_states() {
            return;
        }
        let states = std::mem::take(&mut self.sequences[index].states);
        states.reads.into_iter().for_each(|slot| self.cache.end_read(slot));
        // In reverse, so that a sequence that starts next gets the same slots in the same order.
        states.fills.into_iter().chain(states.before).for_each(|slot| self.cache.give_back_state(slot));
        states.working.into_iter().rev().for_each(|slot| self.cache.give_back_state(slot));
    }

    /// The part of `check` about states: no slot is lost, or had twice.
    pub(super) fn check_states(&self) -> Result<()> {
        let Some(arena) = self.state_arena() else { return Ok(()) };
        for sequence in self.placed() {
            let (slots, rows) = (sequence.states.working.len(), sequence.rows.len());
            if slots != rows {
                return Err(Error::broken("I17 states", format!("{slots} slots for {rows} rows")));
            }
            let SequenceStates { reads, fills, before, .. } = sequence.states;
            if self.in_flight.is_empty() && [reads, fills, before].iter().any(Option::is_some) {
                return Err(Error::broken("I17 states", "a copy of a step that is over is not settled"));
            }
        }
        let worked_in = self.placed().flat_map(|sequence| &sequence.states.working).copied();
        let left = self.placed().filter_map(|sequence| sequence.states.before);
        let working: Vec<StateSlot> = worked_in.chain(left).collect();
        let filling: Vec<StateSlot> = self.placed().filter_map(|sequence| sequence.states.fills).collect();
        let read = self.placed().filter_map(|sequence| sequence.states.reads);
        let read: Vec<StateSlot> = read.filter(|&slot| slot != StateSlot::INITIAL).collect();
        arena.check(&working, &filling, &read)
    }

    fn takes_checkpoints(&self) -> bool {
        self.cache.has_states() && self.config.enable_prefix_caching
    }
}
