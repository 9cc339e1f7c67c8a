//! Samples of one prompt whose common block another request has published first.
//!
//! A sequence gives its block up for an equal one that is published. Where its forks hold that block too, all of them do at
//! once: what hangs below the published one is then held by nobody who does not hold that one.

use smallvec::SmallVec;

use super::Scheduler;
use super::sequence::{SeqIndex, Sequence};

impl Scheduler {
    /// Has a sequence's forks go over to the published block that keeps it from publishing its next one. Returns whether
    /// there is one, and nobody else holds the block that is given up.
    pub(super) fn fold_forks(&mut self, index: SeqIndex) -> bool {
        let sequence = &self.sequences[index];
        let place = sequence.cursor.published;
        if place >= self.block_size.full_blocks(sequence.num_computed) {
            return false;
        }
        let Some(node) = self.cache.computed_twin(sequence.cursor, sequence.scope, &sequence.tokens) else {
            return false;
        };
        let shares = |other: &Sequence| {
            let mut blocks = other.tables.iter().zip(&sequence.tables);
            other.key.request == sequence.key.request
                && blocks.all(|(other, own)| other.blocks().get(place) == own.blocks().get(place))
        };
        let others = self.running.iter().copied().chain(self.paused.iter_placed());
        // Those that ended in the step at hand are still listed.
        let is_fork = |&other: &SeqIndex| {
            other != index && self.sequences.contains(other) && shares(&self.sequences[other])
        };
        let forks: SmallVec<[SeqIndex; 4]> = others.filter(is_fork).collect();
        if forks.is_empty() || !self.cache.folds_for(node, &sequence.tables, place, forks.len() + 1) {
            return false;
        }
        for fork in forks {
            self.cache.go_over(node, &mut self.sequences[fork].tables, place);
            self.sequences[fork].epoch = self.new_epoch();
        }
        true
    }
}
