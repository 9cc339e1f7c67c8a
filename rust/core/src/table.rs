//! One sequence's blocks, in order. The table is what owns references: dropping it gives all of them back at once.
//!
//! ```text
//! [0, published)          read-only, findable by others through the prefix tree
//! [published, written)    this sequence's own; the last of them may be shared with a fork until one of both writes
//! [written, len)          taken, nothing in them yet
//! ```
//! The first blocks of a table whose positions left a sliding window are given back: the null block stands for them.

use crate::error::Result;
use crate::pool::BlockPool;
use crate::units::{BlockId, BlockSize};

/// A copy of a whole block that must be done before the target is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub source: BlockId,
    /// The block that is overwritten.
    pub target: BlockId,
}

/// The blocks of one sequence.
#[derive(Debug)]
pub struct BlockTable {
    pool: BlockPool,
    blocks: Vec<BlockId>,
    /// Null blocks at the beginning.
    dropped: usize,
}

impl BlockTable {
    /// A table of no blocks.
    pub fn new(pool: &BlockPool) -> Self {
        Self::starting_at(pool, 0)
    }

    /// A table whose first `dropped` blocks are not needed any more.
    pub fn starting_at(pool: &BlockPool, dropped: usize) -> Self {
        Self { pool: pool.clone(), blocks: vec![BlockId::NULL; dropped], dropped }
    }

    /// The pool whose blocks they are.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens a block.
    pub fn block_size(&self) -> BlockSize {
        self.pool.block_size()
    }

    /// The blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many blocks the sequence has, those included that it gave back.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// How many of the first blocks were given back.
    pub fn num_dropped(&self) -> usize {
        self.dropped
    }

    /// The blocks that the table holds.
    pub fn held(&self) -> &[BlockId] {
        &self.blocks[self.dropped..]
    }

    /// Whether the sequence has no block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The slot of a position. The position lies in a block of the table.
    pub fn slot(&self, position: usize) -> i64 {
        let size = self.pool.block_size();
        size.slot(self.blocks[position / size.tokens()], position)
    }

    /// Takes `count` free blocks, or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks) with the numbers.
    pub fn extend(&mut self, count: usize) -> Result<()> {
        let blocks = &mut self.blocks;
        self.pool.allocate(count, |block| blocks.push(block))
    }

    /// Makes the table's list large enough for `len` blocks. Takes none.
    pub fn reserve(&mut self, len: usize) {
        self.blocks.reserve_exact(len.saturating_sub(self.blocks.len()));
    }

    /// A second table over the same blocks: a block is copied when one of both is about to write it.
    pub fn fork(&self) -> Self {
        self.held().iter().for_each(|&block| self.pool.retain(block));
        Self { pool: self.pool.clone(), blocks: self.blocks.clone(), dropped: self.dropped }
    }

    /// Whether the block at `index` is held by nobody else and findable by nobody, so that it may be written.
    pub fn is_writable(&self, index: usize) -> bool {
        self.pool.is_private(self.blocks[index])
    }

    /// Puts a block of this table's own in the place of a shared one, and says what must be copied.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks) if no block is free.
    pub fn copy_on_write(&mut self, index: usize) -> Result<BlockCopy> {
        let mut target = BlockId::NULL;
        self.pool.allocate(1, |block| target = block)?;
        let source = std::mem::replace(&mut self.blocks[index], target);
        self.pool.release(&[source]);
        Ok(BlockCopy { source, target })
    }

    /// Gives back the blocks from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len < self.blocks.len() {
            self.pool.release(&self.blocks[len.max(self.dropped)..]);
            self.blocks.truncate(len);
            self.dropped = self.dropped.min(len);
        }
    }

    /// Gives back the first `len` blocks, and keeps their places. Returns how many were held until now.
    pub fn drop_front(&mut self, len: usize) -> usize {
        let len = len.min(self.blocks.len());
        if len <= self.dropped {
            return 0;
        }
        let given_back = &mut self.blocks[self.dropped..len];
        self.pool.release(given_back);
        given_back.fill(BlockId::NULL);
        len - std::mem::replace(&mut self.dropped, len)
    }

    /// Gives back what lies before block `index`, and goes on there: what lies between is not needed.
    pub(crate) fn skip_to(&mut self, index: usize) {
        self.drop_front(index);
        if index > self.blocks.len() {
            self.blocks.resize(index, BlockId::NULL);
            self.dropped = index;
        }
    }

    /// Appends a block whose reference the caller has taken for this table.
    pub(crate) fn push_retained(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Uses `block` in the place of an equal one. The caller has taken the reference for this table.
    pub(crate) fn replace_retained(&mut self, index: usize, block: BlockId) {
        let before = std::mem::replace(&mut self.blocks[index], block);
        self.pool.release(&[before]);
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        self.pool.release(self.held());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::units::BlockSize;

    fn pool(num_blocks: usize) -> BlockPool {
        BlockPool::new(num_blocks, BlockSize::new(4).unwrap()).unwrap()
    }

    #[test]
    fn slots_follow_the_table() {
        let mut table = BlockTable::new(&pool(8));
        table.extend(2).unwrap();
        let block = table.blocks()[1].get() as i64;
        assert_eq!(table.slot(6), block * 4 + 2);
    }

    #[test]
    fn extend_beyond_what_is_free_takes_nothing() {
        let pool = pool(4);
        let mut table = BlockTable::new(&pool);
        assert!(table.extend(4).is_err());
        assert_eq!((table.len(), pool.num_free()), (0, 3));
    }

    #[test]
    fn a_fork_copies_the_shared_block_once_and_the_last_holder_writes_in_place() {
        let pool = pool(8);
        let mut first = BlockTable::new(&pool);
        first.extend(2).unwrap();
        let mut second = first.fork();
        assert!(!first.is_writable(1));
        let copy = second.copy_on_write(1).unwrap();
        assert_eq!((copy.source, copy.target), (first.blocks()[1], second.blocks()[1]));
        assert!(first.is_writable(1) && second.is_writable(1));
        assert!(!first.is_writable(0));
        drop((first, second));
        assert_eq!(pool.num_free(), 7);
    }

    #[test]
    fn truncate_gives_back_what_is_beyond() {
        let pool = pool(8);
        let mut table = BlockTable::new(&pool);
        table.extend(5).unwrap();
        table.truncate(2);
        table.truncate(3);
        assert_eq!((table.len(), pool.num_free()), (2, 5));
    }

    #[test]
    fn blocks_that_left_the_window_are_free_and_the_others_keep_their_places() {
        let pool = pool(8);
        let mut table = BlockTable::starting_at(&pool, 1);
        table.extend(4).unwrap();
        let last = table.blocks()[4];
        assert_eq!(table.drop_front(3), 2);
        assert_eq!(table.drop_front(2), 0);
        assert_eq!((table.len(), table.num_dropped(), pool.num_free()), (5, 3, 5));
        assert_eq!(table.blocks()[..3], [BlockId::NULL; 3]);
        assert_eq!(table.held()[1], last);
        drop(table.fork());
        assert_eq!(table.drop_front(99), 2);
        assert_eq!(pool.num_free(), 7);
        table.truncate(1);
        assert_eq!((table.len(), table.num_dropped()), (1, 1));
    }
}
