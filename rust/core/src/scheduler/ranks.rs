//! Who gives way to the first that waits, if that gets it in: paused sequences, then running ones of a later rank.

use hashbrown::{HashMap, HashSet};

use super::Scheduler;
use super::reserve::Reserve;
use super::sequence::SeqIndex;
use super::step::Step;
use crate::policy::order::QueueOrder;
use crate::policy::victim::fewest;
use crate::units::BlockId;

/// What some sequences would give back: the last paused ones that hold rows and blocks, then the last running ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Relief {
    /// How many of them are paused.
    pub(super) paused: usize,
    /// How many of them run.
    pub(super) sequences: usize,
    pub(super) rows: usize,
    /// Blocks that nobody else holds.
    pub(super) blocks: usize,
    /// Those of them that the waiting sequence would share.
    pub(super) hits: usize,
    /// Blocks that those which stay take for their next tokens before anybody starts.
    pub(super) taken: usize,
}

impl Scheduler {
    /// Has as few others give way as the first of the waiting needs, or nobody if it would not fit all the same. While a
    /// step in flight has a row for one of them, those that run are left out of the plan instead: returns whether that is
    /// so.
    pub(super) fn make_way_for_waiting(&mut self, step: &mut Step) -> bool {
        if self.config.preempt_lower_ranks && self.config.queue_order == QueueOrder::Priority {
            step.reserve = Reserve::of(self.config.max_num_batched_tokens / 2);
        }
        if !self.config.preempt_lower_ranks && self.paused.iter_placed().next().is_none() {
            return false;
        }
        let Some((key, index)) = self.first_waiting() else { return false };
        // Who did not fit when last tried fits only after a change.
        if self.first_tried.replace(key) == Some(key) && !self.queue_changed {
            return false;
        }
        let Some(relief) = self.relief_for(&[index], key.rank) else { return false };
        let first = self.running.len() - relief.sequences;
        if self.running[first..].iter().any(|&victim| self.sequences[victim].is_in_flight()) {
            self.held_back.extend(&self.running[first..]);
            // They can give way when that step is over.
            self.queue_changed = true;
            return true;
        }
        (0..relief.paused).for_each(|_| _ = self.preempt_paused(step));
        while self.running.len() > first
            && let Some(last) = self.running.pop()
        {
            self.preempt(step, last);
        }
        if step.reserve.is_on() {
            step.reserve.start(key.rank, self.first_chunk(index));
        }
        if relief.sequences > 0 && self.config.max_steps_in_flight > 1 {
            self.hold_back_for_second();
        }
        false
    }

    /// Leaves those out of the plan at hand that the second of the waiting will push out of the next one, so that the two
    /// do not wait two steps for each other.
    fn hold_back_for_second(&mut self) {
        let mut waiting = self.waiting.iter().take(2).map(|(&key, &index)| (key, index));
        let (Some((_, first)), Some((key, second))) = (waiting.next(), waiting.next()) else { return };
        let Some(relief) = self.relief_for(&[first, second], key.rank) else { return };
        let kept = self.running.len() - relief.sequences;
        self.held_back.extend(&self.running[kept..]);
    }

    /// The least that lets sequences start together which wait at a rank, if there is anybody who may give way; none: they
    /// cannot start though all of those give way.
    fn relief_for(&mut self, starting: &[SeqIndex], rank: u64) -> Option<Relief> {
        let paused: Vec<SeqIndex> = self.paused.iter_placed().rev().collect();
        let is_later = |&&index: &&SeqIndex| self.sequences[index].key.rank > rank;
        let num_later = if self.config.preempt_lower_ranks {
            self.running.iter().rev().take_while(is_later).count()
        } else {
            0
        };
        if paused.is_empty() && num_later == 0 {
            return None;
        }
        let demands: Vec<_> = starting.iter().map(|&index| self.demand(index)).collect();
        let taken = self.running.iter().map(|&index| self.next_blocks(index)).sum();
        let nobody = Relief { taken, ..Relief::default() };
        if self.fit(&demands, nobody) {
            return Some(nobody);
        }
        let hits = starting.iter().flat_map(|&index| self.hits(index)).collect();
        let reliefs = self.reliefs(nobody, &paused, num_later, &hits);
        // A victim more never leaves less, but for a forecast that counts on blocks of it which others share.
        let found = fewest(&reliefs, |relief| self.fit(&demands, relief));
        // Alone, a sequence always fits, if need be without what it would share.
        let alone = reliefs.last().filter(|_| self.running.is_empty()).copied();
        found.or(alone)
    }

    /// What the first of those that may give way would give back, the first two, and so on.
    fn reliefs(
        &self,
        nobody: Relief,
        paused: &[SeqIndex],
        num_later: usize,
        hits: &HashSet<BlockId>,
    ) -> Vec<Relief> {
        let mut relief = nobody;
        let mut held: HashMap<BlockId, usize> = HashMap::new();
        let running = self.running.iter().rev().take(num_later);
        let victims = paused.iter().map(|index| (index, true)).chain(running.map(|index| (index, false)));
        let with_one_more = |(&index, is_paused): (&SeqIndex, bool)| {
            let sequence = &self.sequences[index];
            relief.paused += usize::from(is_paused);
            relief.sequences += usize::from(!is_paused);
            relief.rows += sequence.rows.len();
            relief.taken -= if is_paused { 0 } else { self.next_blocks(index) };
            for &block in sequence.tables.iter().flat_map(|table| table.held()) {
                let references = self.cache.pool().references(block);
                let is_last = references == 1 || {
                    let count = held.entry(block).or_default();
                    *count += 1;
                    *count == references
                };
                if is_last {
                    relief.blocks += 1;
                    relief.hits += usize::from(hits.contains(&block));
                }
            }
            relief
        };
        victims.map(with_one_more).collect()
    }

    /// Blocks that a running sequence takes for its next token, if that is all that it computes. A window lets as many go,
    /// sooner or later.
    fn next_blocks(&self, index: SeqIndex) -> usize {
        let sequence = &self.sequences[index];
        if !sequence.decodes() && !sequence.can_go_on_unseen() {
            return 0;
        }
        let next = self.block_size.full_blocks(sequence.num_planned);
        let keeps_all = sequence.tables.iter().zip(&self.config.groups).filter(|(_, group)| group.is_full());
        keeps_all.filter(|(table, _)| table.len() <= next || !table.is_writable(next)).count()
    }
}
