//! Publishing what a sequence has computed, and what others were to compute later.
//!
//! With two steps in flight, a step that was planned already may be to fill a block that another request has just computed:
//! two equal prompts, the first of which gets larger chunks. If the first waited for that step, it would publish as slowly
//! as the second one computes, and what it publishes below would be found late or never. So its own block takes the place.

use smallvec::{SmallVec, smallvec};

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

    /// Puts a sequence's next blocks in the place of all that the later step is to fill from a node on, if it has computed
    /// them all and nobody shares them: then nothing of that step hangs below what its own sequence does not hold, and no
    /// failure of it concerns anybody else. Returns whether that was done.
    fn take_over(&mut self, index: SeqIndex, node: NodeId) -> bool {
        let Some(nodes) = self.announced_from(node) else { return false };
        let Sequence { tables, cursor, scope, tokens, num_computed, .. } = &self.sequences[index];
        if !self.cache.take_over(&nodes, tables, *cursor, *scope, &tokens[..*num_computed]) {
            return false;
        }
        if let Some(later) = self.in_flight.oldest_mut() {
            later.announced.retain(|filled| !nodes.contains(&filled.announced.node));
        }
        true
    }

    /// The nodes that the later step has announced from one on, each below the one before it; none if they part.
    fn announced_from(&self, node: NodeId) -> Option<SmallVec<[NodeId; 8]>> {
        let mut nodes: SmallVec<[NodeId; 8]> = smallvec![node];
        for filled in self.in_flight.oldest().into_iter().flat_map(|step| &step.announced) {
            if Some(&filled.announced.parent) == nodes.last() {
                nodes.push(filled.announced.node);
            } else if nodes.contains(&filled.announced.parent) {
                return None;
            }
        }
        Some(nodes)
    }
}
