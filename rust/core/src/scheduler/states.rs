//! States of fixed size, for models that have some: which slot a sequence works in, and the copies of a step.
//!
//! ```text
//! before the model runs   checkpoint, or slot 0 ──▶ working slot      of each sequence that starts in this step
//! the model runs          working slots are read and overwritten
//! after it                working slot ──▶ checkpoint                 where the chunk ends at a place for one
//!                         working slot ──▶ working slot               of each sample that is forked off
//! ```
//! A state that a step has touched cannot be brought back: when a step fails as a whole, its sequences start again from
//! their last checkpoint, and who is set back once more before it got any further takes one at each block. For the same
//! reason states are not swapped, no draft is checked, and twins do not share what one of them is just computing.

use super::Scheduler;
use super::config::SchedulerConfig;
use super::sequence::{SeqIndex, SeqKey, Sequence};
use super::step::Step;
use crate::error::{Error, Result};
use crate::policy::checkpoint::{chunk_end, takes_checkpoint};
use crate::states::{Home, StateArena, StateCopy, StateSlot};

/// Failed steps in a row from which on a sequence takes every checkpoint that it can: where a step computes less than what
/// lies between two, it would start again for ever.
const STUCK: usize = 2;

/// What a sequence has of the arena. Nothing, while it waits.
#[derive(Debug, Default)]
pub(super) struct SequenceStates {
    /// A slot for each of its rows, as long as it runs.
    pub(super) working: Vec<StateSlot>,
    /// What the step in flight copies to its working slot, if it starts with that step.
    reads: Option<StateSlot>,
    /// The slot that the step in flight fills with a checkpoint.
    fills: Option<StateSlot>,
    /// Tokens whose blocks were cached when it started, if they are more than its hit: another prompt has parted there.
    parting: usize,
}

impl SequenceStates {
    /// Of a further sample that goes on in a slot of its own.
    pub(super) fn forked(slot: StateSlot) -> Self {
        Self { working: vec![slot], ..Self::default() }
    }
}

impl SchedulerConfig {
    /// Whether sequences have states.
    pub fn has_states(&self) -> bool {
        self.num_state_slots > 0
    }

    /// Tokens from one of a sequence's places for a checkpoint to the next.
    fn checkpoint_tokens(&self, sequence: &Sequence) -> usize {
        let is_stuck = sequence.setbacks >= STUCK;
        if is_stuck { self.block_size } else { self.checkpoint_every.saturating_mul(self.block_size) }
    }

    /// Whether a scheduler can keep what the other options promise for a model with states.
    pub(super) fn validate_states(&self) -> Result<()> {
        super::config::within("num_state_slots", self.num_state_slots, 0, 1 << 24)?;
        super::config::within("checkpoint_every", self.checkpoint_every, 1, 1 << 24)?;
        if !self.has_states() {
            return Ok(());
        }
        if self.num_state_slots < 2 {
            let allowed = "0, or at least 2: slot 0 is the initial state";
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

    /// Whether so many slots can be had for sequences that start, besides the one that is kept to be read.
    pub(super) fn slots_fit(&self, num_samples: usize, relief: usize, keeps_checkpoint: bool) -> bool {
        let available = self.state_arena().map_or(usize::MAX, StateArena::available);
        let available = available - usize::from(self.keeps_first_home());
        available.saturating_add(relief) >= num_samples + usize::from(keeps_checkpoint)
    }

    /// Whether a slot that can be had is not for who starts: the first in order shall find its checkpoint again. Only where
    /// two slots are left when all rows run, so that nobody waits longer than until the step in flight has read its own.
    fn keeps_first_home(&self) -> bool {
        let Some(arena) = self.state_arena() else { return false };
        let has_two = self.config.num_state_slots > self.config.max_num_seqs.saturating_add(2);
        let first = self.homes.first_key_value().filter(|_| has_two && !self.running.is_empty());
        first.is_some_and(|(_, &home)| arena.is_there(home) && arena.is_idle(home.slot))
    }

    /// Where a chunk over `start..end` of a sequence ends, so that a checkpoint can be taken.
    pub(super) fn cut_chunk(&self, sequence: &Sequence, num_tokens: usize) -> usize {
        if !self.takes_checkpoints() || num_tokens == 0 {
            return num_tokens;
        }
        let (start, interval) = (sequence.num_planned, self.config.checkpoint_tokens(sequence));
        chunk_end(start, start + num_tokens, interval, sequence.states.parting) - start
    }

    /// Gives a starting sequence a slot for each of its rows, the first filled from what its hit landed on. Comes right
    /// after the lookup.
    pub(super) fn start_states(&mut self, step: &mut Step, index: SeqIndex) {
        if !self.cache.has_states() {
            return;
        }
        let sequence = &mut self.sequences[index];
        let known = self.cache.num_known();
        let is_further = sequence.reuse_cached && known > sequence.cursor.published;
        // Held before slots are taken: those may be had by evicting a checkpoint.
        let source = self.cache.begin_read(sequence.cursor);
        let taken =
            (0..sequence.num_samples).map(|_| self.cache.take_working().expect("admission saw enough slots"));
        let states = &mut sequence.states;
        states.working.extend(taken);
        states.reads = Some(source);
        states.parting = if is_further { self.block_size.tokens() * known } else { 0 };
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

    /// A slot for a sequence's next checkpoint. What others would start again from goes for it only if they come later:
    /// the step may fail, and then the first in order still has its last checkpoint.
    fn begin_checkpoint(&mut self, index: SeqIndex) -> Option<StateSlot> {
        let Sequence { key, cursor, .. } = self.sequences[index];
        let slot = self.cache.begin_checkpoint(cursor);
        if slot.is_some() || !self.cache.goes_on(cursor) {
            return slot;
        }
        let arena = self.state_arena().expect("there are states");
        let is_own = |home: &&Home| {
            arena.is_there(**home) && !self.homes.range(..key).any(|(_, other)| other == *home)
        };
        let own = self.homes.get(&key).filter(is_own);
        let is_of_later = |home: &&Home| is_own(home) && own.is_none_or(|own| own != *home);
        let of_later = || self.homes.range(key..).rev().map(|(_, home)| home).filter(is_of_later);
        // One that the step at hand reads is free when that is over: too late for this checkpoint, not for the next. Its
        // own goes where there is room for one only.
        let home = of_later().find(|home| arena.is_idle(home.slot)).or_else(|| of_later().next());
        let home = *home.or(own.filter(|own| arena.is_idle(own.slot)))?;
        self.cache.drop_held(home);
        self.cache.begin_checkpoint(cursor)
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
            let interval = self.config.checkpoint_tokens(sequence);
            let forks = sequence.states.working.iter().take(row.num_samples).skip(1);
            step.state_saves.extend(forks.map(|&target| StateCopy { source, target }));
            if takes_checkpoints && takes_checkpoint(sequence.num_planned, interval, sequence.states.parting)
            {
                takers.push(row.sequence);
            }
        }
        takers.sort_unstable_by_key(|&index| self.sequences[index].key);
        for &index in &takers {
            let fills = self.begin_checkpoint(index);
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
        states.fills.into_iter().for_each(|slot| self.cache.give_back_state(slot));
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
            if self.in_flight.is_empty()
                && (sequence.states.reads.is_some() || sequence.states.fills.is_some())
            {
                return Err(Error::broken("I17 states", "a copy of a step that is over is not settled"));
            }
        }
        let working: Vec<StateSlot> =
            self.placed().flat_map(|sequence| &sequence.states.working).copied().collect();
        let filling: Vec<StateSlot> = self.placed().filter_map(|sequence| sequence.states.fills).collect();
        let read = self.placed().filter_map(|sequence| sequence.states.reads);
        let read: Vec<StateSlot> = read.filter(|&slot| slot != StateSlot::INITIAL).collect();
        arena.check(&working, &filling, &read)
    }

    fn takes_checkpoints(&self) -> bool {
        self.cache.has_states() && self.config.enable_prefix_caching
    }
}
