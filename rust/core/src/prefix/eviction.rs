//! The order in which idle blocks are evicted: least recently used first, leaves first, without looking for a leaf.
//!
//! Blocks enter at the young end when their last reference is given back, each block after those that follow it in its
//! sequence. A block that follows another one never has a reference when that one has none. So whatever stands at the
//! old end has nothing below it: it is a leaf.

use crate::units::BlockId;

const NONE: u32 = 0;

#[derive(Clone, Copy, Debug, Default)]
struct Links {
    older: u32,
    younger: u32,
    listed: bool,
}

/// A doubly linked list of idle blocks through an array: every operation takes constant time.
#[derive(Debug)]
pub(crate) struct EvictionOrder {
    /// Entry 0 is the ring's anchor: its `younger` is the oldest block, its `older` the youngest.
    links: Vec<Links>,
    len: usize,
}

impl EvictionOrder {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self { links: vec![Links::default(); num_blocks], len: 0 }
    }

    /// Blocks that can be evicted.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].listed
    }

    /// The block to evict next.
    pub(crate) fn oldest(&self) -> Option<BlockId> {
        let oldest = self.links[0].younger;
        (oldest != NONE).then_some(BlockId::new(oldest))
    }

    /// Lists a block as the one used last.
    pub(crate) fn insert(&mut self, block: BlockId) {
        let youngest = self.links[0].older;
        self.links[block.index()] = Links { older: youngest, younger: NONE, listed: true };
        self.links[youngest as usize].younger = block.get();
        self.links[0].older = block.get();
        self.len += 1;
    }

    /// Takes a block out of the list, wherever it stands.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Links { older, younger, .. } = std::mem::take(&mut self.links[block.index()]);
        self.links[older as usize].younger = younger;
        self.links[younger as usize].older = older;
        self.len -= 1;
    }

    /// The blocks, the oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        std::iter::successors(self.oldest(), |block| {
            let younger = self.links[block.index()].younger;
            (younger != NONE).then_some(BlockId::new(younger))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn order(ids: &[u32]) -> EvictionOrder {
        let mut order = EvictionOrder::new(10);
        ids.iter().for_each(|&id| order.insert(BlockId::new(id)));
        order
    }

    fn ids(order: &EvictionOrder) -> Vec<u32> {
        order.iter().map(BlockId::get).collect()
    }

    #[test]
    fn the_oldest_goes_first() {
        assert_eq!(order(&[5, 2, 7]).oldest(), Some(BlockId::new(5)));
        assert_eq!(order(&[]).oldest(), None);
    }

    #[test]
    fn a_block_is_removed_from_any_place() {
        for (removed, rest) in [(5, [2, 7]), (2, [5, 7]), (7, [5, 2])] {
            let mut order = order(&[5, 2, 7]);
            order.remove(BlockId::new(removed));
            assert_eq!(ids(&order), rest);
            assert!(!order.contains(BlockId::new(removed)));
            order.insert(BlockId::new(removed));
            assert_eq!(order.len(), 3);
            assert_eq!(ids(&order)[2], removed);
        }
    }
}
