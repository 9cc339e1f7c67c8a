//! The cache's part of `docs/invariants.md`.

use super::PrefixCache;
use super::tree::NodeId;
use crate::error::{Error, Result};
use crate::sync::spin;
use crate::units::BlockId;

/// Blocks that a check looks at before it believes that something is broken: far more than fit into the moment in which
/// another thread has given a block back and has not said so yet.
const MAX_VISITS: usize = 20_000_000;

impl PrefixCache {
    /// Compares the tree, the eviction order and the pool with each other, block by block.
    ///
    /// Other threads may give blocks back meanwhile: what is found broken is looked at again, until that cannot be why.
    ///
    /// # Errors
    /// [`Error::Broken`] with the first invariant that does not hold.
    pub fn check(&mut self) -> Result<()> {
        let mut looks = (MAX_VISITS / self.pool.num_blocks()).max(3);
        loop {
            let found = self.check_once();
            looks -= 1;
            if found.is_ok() || looks == 0 {
                return found;
            }
            spin();
        }
    }

    fn check_once(&mut self) -> Result<()> {
        self.adopt_returned();
        let (fast, slow) = (self.counts(), self.pool.count());
        if fast != slow {
            return Err(Error::broken("I1 partition", format!("counted {slow:?}, accounted {fast:?}")));
        }
        let mut attached = 0;
        for node in self.tree.iter() {
            attached += self.check_node(node)?;
        }
        let blocks = (1..self.pool.num_blocks() as u32).map(BlockId::new);
        let published = blocks.filter(|&block| self.pool.is_published(block)).count();
        if published != attached {
            let detail = format!("{published} blocks are published, {attached} stand in the tree");
            return Err(Error::broken("I4 published", detail));
        }
        self.checkpoints.as_ref().map_or(Ok(()), |states| states.check(|node| self.tree.contains(node)))?;
        self.check_eviction_order()
    }

    /// Returns how many blocks the node has.
    fn check_node(&self, node: NodeId) -> Result<usize> {
        let (mut attached, parent) = (0, self.tree.parent(node));
        if !self.tree.contains(parent) {
            return Err(Error::broken("I6 chain", format!("{node:?} hangs below {parent:?}, which is gone")));
        }
        if self.tree.is_computed(node) && !self.tree.is_computed(parent) {
            let detail = format!("{node:?} is computed, {parent:?} above it is announced only");
            return Err(Error::broken("I6 chain", detail));
        }
        for (index, &block) in self.tree.blocks(node).iter().enumerate() {
            let is_full = self.groups[index].is_full();
            if block == BlockId::NULL {
                if is_full {
                    return Err(Error::broken("I6 chain", format!("{node:?} has no block in group {index}")));
                }
                continue;
            }
            attached += 1;
            self.check_block(node, block)?;
            if is_full && parent != NodeId::ROOT {
                self.check_above(self.tree.blocks(parent)[index], block)?;
            }
        }
        if attached == 0 && self.tree.num_children(node) == 0 {
            return Err(Error::broken("I4 published", format!("{node:?} has no block and nothing below it")));
        }
        Ok(attached)
    }

    fn check_block(&self, node: NodeId, block: BlockId) -> Result<()> {
        let id = block.get();
        if !self.pool.is_published(block) || self.node_of[block.index()] != node {
            let detail = format!("block {id} stands at {node:?} and is not published there");
            return Err(Error::broken("I4 published", detail));
        }
        if self.pool.is_idle(block) != self.order.contains(block) {
            return Err(Error::broken("I5 evictable", format!("block {id} is idle or listed, not both")));
        }
        Ok(())
    }

    fn check_above(&self, parent: BlockId, block: BlockId) -> Result<()> {
        if self.pool.is_idle(parent) && !self.pool.is_idle(block) {
            let detail = format!("block {} is used, {} above it is not", block.get(), parent.get());
            return Err(Error::broken("I6 chain", detail));
        }
        Ok(())
    }

    /// Whether each idle block stands before the one that it follows in its sequence: then the first is a leaf.
    fn check_eviction_order(&self) -> Result<()> {
        self.check_leaves_first(self.order.iter())?;
        self.order.iter_shares().try_for_each(|blocks| self.check_leaves_first(blocks))
    }

    fn check_leaves_first(&self, order: impl Iterator<Item = BlockId>) -> Result<()> {
        let mut seen = vec![false; self.pool.num_blocks()];
        for block in order {
            seen[block.index()] = true;
            let (node, group) = self.place(block);
            let parent = self.tree.parent(node);
            if !self.groups[group].is_full() || parent == NodeId::ROOT {
                continue;
            }
            let above = self.tree.blocks(parent)[group];
            if seen[above.index()] {
                let detail = format!("block {} would go before {}", above.get(), block.get());
                return Err(Error::broken("I5 evictable", detail));
            }
        }
        Ok(())
    }
}
