//! What a failed row takes with it: the nodes that it announced, and who shares them.

use hashbrown::HashSet;

use super::Scheduler;
use super::sequence::SeqIndex;
use super::step::{Filled, Step};
use crate::prefix::NodeId;

type Places = HashSet<(NodeId, u64)>;

impl Scheduler {
    /// Takes back the nodes that failed rows of a step announced, what their sequences announced in the step after it, and
    /// what others announced below them in both. Those that did not fail and yet share such a node are void: nothing more
    /// is planned for them before they start again.
    pub(super) fn withdraw_failed(&mut self, step: &Step) {
        let mut bad = Places::new();
        for Filled { announced, batch_row } in &step.announced {
            if bad.contains(&announced.parent_place()) || step.has_failed(*batch_row) {
                bad.insert(announced.place());
            }
        }
        let later = self.in_flight.oldest().filter(|later| later.id > step.id && !later.announced.is_empty());
        if let Some(later) = later {
            let failed: HashSet<SeqIndex> = step.failed_sequences().collect();
            for Filled { announced, batch_row } in &later.announced {
                let has_failed = failed.contains(&later.rows[*batch_row].sequence);
                if bad.contains(&announced.parent_place()) || has_failed {
                    bad.insert(announced.place());
                }
            }
        }
        if !bad.is_empty() {
            self.void_those_that_share(&bad);
            self.withdraw(step, &bad);
        }
    }

    /// What hangs below a bad node is bad: a sequence shares one if the last that it shares is.
    fn void_those_that_share(&mut self, bad: &Places) {
        for &index in &self.running {
            let sequence = &mut self.sequences[index];
            if bad.contains(&sequence.cursor.place()) {
                (sequence.is_void, sequence.is_leaving) = (true, true);
                // Where it stood is gone, and nothing of it is published before it starts again.
                sequence.cursor = self.cache.nowhere();
            }
        }
    }

    /// The latest first: nothing hangs below what is taken out.
    fn withdraw(&mut self, step: &Step, bad: &Places) {
        let is_bad = |filled: &Filled| bad.contains(&filled.announced.place());
        if let Some(later) = self.in_flight.oldest_mut().filter(|later| later.id > step.id) {
            for filled in later.announced.iter().rev().filter(|filled| is_bad(filled)) {
                self.cache.withdraw(filled.announced);
            }
            later.announced.retain(|filled| !is_bad(filled));
        }
        for filled in step.announced.iter().rev().filter(|filled| is_bad(filled)) {
            self.cache.withdraw(filled.announced);
        }
    }
}
