//! How idle blocks make room, leaves first.

use super::PrefixCache;
use super::tree::NodeId;
use crate::error::{Error, Result};
use crate::sync::spin;
use crate::units::BlockId;

/// How often an eviction looks again for a block that another thread is giving back: far longer than that takes.
const MAX_WAITS: usize = 10_000_000;

impl PrefixCache {
    /// Sees to it that `count` blocks are free.
    pub(super) fn make_room(&mut self, count: usize) -> Result<()> {
        let available = self.available();
        if count > available {
            return Err(Error::OutOfBlocks { needed: count, available });
        }
        let mut waits = 0;
        while self.pool.num_free() < count {
            let Some(first) = self.order.first() else { break };
            let (node, group) = self.place(first);
            if self.groups[group].is_full() && self.tree.num_children(node) > 0 {
                // Another thread has given back a block below and is about to say so.
                waits += 1;
                if waits > MAX_WAITS {
                    let detail = format!("block {} is idle, and what hangs below it is not", first.get());
                    return Err(Error::broken("I6 chain", detail));
                }
                spin();
                self.adopt_returned();
                continue;
            }
            self.evict(node, group);
        }
        Ok(())
    }

    /// Without a block of a group that keeps all positions, a node serves nobody: its other blocks go too.
    fn evict(&mut self, node: NodeId, group: usize) {
        let before = self.order.len();
        if self.groups[group].is_full() {
            self.detach_all(node);
        } else {
            self.detach(node, group);
        }
        self.evictions += (before - self.order.len()) as u64;
        self.prune(node);
    }

    /// Where a published block hangs, and in which group.
    pub(super) fn place(&self, block: BlockId) -> (NodeId, usize) {
        let node = self.node_of[block.index()];
        let group = self.tree.blocks(node).iter().position(|&other| other == block);
        (node, group.expect("a published block hangs at its node"))
    }

    /// Lists the blocks whose last reference was given back meanwhile.
    pub(super) fn adopt_returned(&mut self) {
        let mut returned = std::mem::take(&mut self.returned);
        self.pool.take_returned(&mut returned);
        if self.tracked.is_active && !returned.is_empty() {
            self.order.begin_use();
        }
        for &block in &returned {
            if self.pool.is_idle(block) && !self.order.contains(block) {
                let (node, group) = self.place(block);
                self.order.insert(block, self.standing(node));
                if self.groups[group].is_full() {
                    self.lift_above(node, group, block);
                }
            }
        }
        self.returned = returned;
    }

    /// Moves the listed blocks that a block follows behind it: they may have been given back by another thread, or
    /// earlier and used again meanwhile. A block of a window stands for itself.
    fn lift_above(&mut self, node: NodeId, group: usize, block: BlockId) {
        let lane = self.order.lane(block);
        let mut above = self.tree.parent(node);
        while above != NodeId::ROOT {
            let parent = self.tree.blocks(above)[group];
            let stands = self.order.lane(parent);
            if stands.is_none() || (stands > lane && !self.order.was_used_before(parent)) {
                return;
            }
            self.order.remove(parent);
            self.order.insert(parent, self.standing(above));
            above = self.tree.parent(above);
        }
    }
}
