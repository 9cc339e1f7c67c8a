//! Publishing what a sequence has computed, and what others were to compute later.
//!
//! With two steps in flight, a step that was planned already may be to fill a block that another request has just computed:
//! two equal prompts, the first of which gets larger chunks. If the first waited for that step, it would publish as slowly
//! as the second one computes, and what it publishes below would be found late or never. So its own block takes the place.

use super::Scheduler;
use super::sequence::{SeqIndex, Sequence};
use crate::prefix::NodeId;

impl Scheduler {
    /// Publishes the blocks that a sequence's computed tokens fill.
    pub(super) fn publish_computed(&mut self, index: SeqIndex) {
        while let Some(node) = self.publish_until_announced(index)
            && self.take_over(index, node)
        {}
    }

    /// The same, up to the first node that a later step has announced, which is returned.
    fn publish_until_announced(&mut self, index: SeqIndex) -> Option<NodeId> {
        let sequence = &mut self.sequences[index];
        let Sequence { tables, cursor, scope, tokens, num_computed, .. } = sequence;
        let later = self.in_flight.oldest();
        let is_later = |place| {
            let announced = later.into_iter().flat_map(|step| &step.announced);
            announced.into_iter().any(|filled| filled.announced.place() == place)
        };
        let published = self.cache.publish_until(tables, cursor, *scope, tokens, *num_computed, is_later);
        if published.is_folded {
            self.next_epoch += 1;
            sequence.epoch = self.next_epoch;
        }
        published.waits_for
    }

    /// Puts a sequence's next block in the place of one that the later step is to fill, if nobody shares that: then no
    /// failure of that step concerns anybody but who announced it. Returns whether that was done.
    fn take_over(&mut self, index: SeqIndex, node: NodeId) -> bool {
        let sequence = &self.sequences[index];
        if !self.cache.take_over(node, &sequence.tables, sequence.cursor.published) {
            return false;
        }
        if let Some(later) = self.in_flight.oldest_mut() {
            later.announced.retain(|filled| filled.announced.node != node);
        }
        true
    }
}
