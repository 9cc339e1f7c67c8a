//! Preemption by rank: running sequences of a later rank make room for the first that waits, if that gets it in.

use hashbrown::HashMap;

use super::Scheduler;
use super::sequence::SeqIndex;
use super::step::Step;
use crate::units::BlockId;

/// What the last running sequences would give back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Relief {
    /// How many of them.
    pub(super) sequences: usize,
    pub(super) rows: usize,
    /// Blocks that nobody else holds.
    pub(super) blocks: usize,
    /// Those of them that the waiting sequence would share.
    pub(super) hits: usize,
}

impl Scheduler {
    /// Preempts as few running sequences of a later rank as the first of the waiting needs, or none if it would not fit
    /// all the same. While a step in flight has a row for one of them, all are left out of the plan instead: returns
    /// whether that is so.
    pub(super) fn preempt_lower_ranks(&mut self, step: &mut Step) -> bool {
        if !self.config.preempt_lower_ranks {
            return false;
        }
        let Some((key, index)) = self.first_waiting() else { return false };
        // Who did not fit when last tried fits only after a change.
        if self.first_tried.replace(key) == Some(key) && !self.queue_changed {
            return false;
        }
        let rank = key.rank;
        if self.fits(index, Relief::default()) {
            return false;
        }
        let first = self.running.len() - self.victims_for(index, rank).unwrap_or(0);
        if self.running[first..].iter().any(|&victim| self.sequences[victim].is_in_flight()) {
            self.held_back.extend_from_slice(&self.running[first..]);
            return true;
        }
        while self.running.len() > first
            && let Some(last) = self.running.pop()
        {
            self.preempt(step, last);
        }
        false
    }

    /// The fewest of the last running sequences, all of a later rank, whose blocks and rows let a sequence start.
    fn victims_for(&mut self, index: SeqIndex, rank: u64) -> Option<usize> {
        let mut relief = Relief::default();
        let mut held: HashMap<BlockId, usize> = HashMap::new();
        let hits = self.hits(index);
        while let Some(place) = self.running.len().checked_sub(relief.sequences + 1) {
            let sequence = &self.sequences[self.running[place]];
            if sequence.key.rank <= rank {
                return None;
            }
            relief.sequences += 1;
            relief.rows += sequence.rows.len();
            for &block in sequence.tables.iter().flat_map(|table| table.held()) {
                let count = held.entry(block).or_default();
                *count += 1;
                if *count == self.cache.pool().references(block) {
                    relief.blocks += 1;
                    relief.hits += usize::from(hits.contains(&block));
                }
            }
            if self.fits(index, relief) {
                return Some(relief.sequences);
            }
        }
        None
    }
}
