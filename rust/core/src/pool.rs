//! The state of each block of the pool, one atomic word a block.
//!
//! ```text
//!              allocate                     publish
//!      FREE ─────────────▶ ACTIVE, private ─────────▶ ACTIVE, published
//!        ▲                     │                          │   ▲
//!        │   last reference    │          last reference  ▼   │ retain
//!        ├─────────────────────┘                        CACHED (idle)
//!        └──────────────────────────────────────────────────┘ evict
//! ```
//! Each arrow is one atomic operation on the block's word, so that a block is in exactly one state at every instant:
//! free + cached + active = total. The tree that makes blocks findable belongs to one owner
//! ([`PrefixCache`](crate::PrefixCache)); references may be given back by any thread. A published block whose last
//! reference was given back waits in `returned` until that owner adopts it into the eviction order.

use crate::error::{Error, Result};
use crate::freelist::{Chain, FreeList};
use crate::memory::check_memory;
use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};
use crate::units::{BlockId, BlockSize};

const PUBLISHED: u32 = 1 << 31;
const RETURNED: u32 = 1 << 30;
/// A word and two links.
const BYTES_PER_BLOCK: usize = 3 * size_of::<u32>();
const REFERENCES: u32 = RETURNED - 1;

/// How many blocks are in which state. The null block is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// Blocks that hold nothing.
    pub free: usize,
    /// Published blocks that nobody uses: found by a prefix hit, or evicted.
    pub cached: usize,
    /// Blocks with at least one reference.
    pub active: usize,
    /// All blocks but the null block.
    pub total: usize,
}

/// A pool of blocks of one size. Cloning gives another handle to the same pool.
#[derive(Clone)]
pub struct BlockPool {
    inner: Arc<Inner>,
}

struct Inner {
    block_size: BlockSize,
    words: Box<[AtomicU32]>,
    free: FreeList,
    returned: FreeList,
    /// How often a cache over the pool was reset.
    resets: AtomicU64,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included, all others free.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `num_blocks` is below 2 or above 2³⁰; [`Error::OutOfMemory`].
    pub fn new(num_blocks: usize, block_size: BlockSize) -> Result<Self> {
        if !(2..=1 << 30).contains(&num_blocks) {
            return Err(Error::config("num_blocks", num_blocks, "2 to 1073741824 (block 0 is reserved)"));
        }
        check_memory("a pool of this many blocks", num_blocks, BYTES_PER_BLOCK)?;
        let inner = Inner {
            block_size,
            words: (0..num_blocks).map(|_| AtomicU32::new(0)).collect(),
            free: FreeList::full(num_blocks),
            returned: FreeList::empty(num_blocks),
            resets: AtomicU64::new(0),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Tokens a block.
    pub fn block_size(&self) -> BlockSize {
        self.inner.block_size
    }

    /// Blocks of the pool, the null block included.
    pub fn num_blocks(&self) -> usize {
        self.inner.words.len()
    }

    /// Blocks that are free at this moment.
    pub fn num_free(&self) -> usize {
        self.inner.free.available()
    }

    /// How often what was published was made unfindable. Who takes blocks before a reset and has them published after it
    /// says so: [`PrefixCache::root_after`](crate::PrefixCache::root_after).
    pub fn num_resets(&self) -> u64 {
        self.inner.resets.load(Ordering::Acquire)
    }

    pub(crate) fn note_reset(&self) {
        self.inner.resets.fetch_add(1, Ordering::AcqRel);
    }

    /// References to a block at this moment.
    pub fn references(&self, block: BlockId) -> usize {
        (self.word(block).load(Ordering::Acquire) & REFERENCES) as usize
    }

    /// Whether a block has exactly one reference and is not published: its holder may write it.
    pub fn is_private(&self, block: BlockId) -> bool {
        self.word(block).load(Ordering::Acquire) & !RETURNED == 1
    }

    /// Whether a block is findable through the prefix tree.
    pub fn is_published(&self, block: BlockId) -> bool {
        self.word(block).load(Ordering::Acquire) & PUBLISHED != 0
    }

    /// Counts the states, block by block: the truth that every other count is checked against.
    pub fn count(&self) -> BlockCounts {
        let mut counts = BlockCounts { total: self.num_blocks() - 1, ..BlockCounts::default() };
        for word in &self.inner.words[1..] {
            match word.load(Ordering::Acquire) & !RETURNED {
                0 => counts.free += 1,
                PUBLISHED => counts.cached += 1,
                _ => counts.active += 1,
            }
        }
        counts
    }

    /// Takes `count` free blocks, each with one reference, or none.
    pub(crate) fn allocate(&self, count: usize, mut take: impl FnMut(BlockId)) -> Result<()> {
        let taken = self.inner.free.pop_chain(count, |block| {
            // Added, not stored: the RETURNED bit of an earlier life may still be set.
            self.word(block).fetch_add(1, Ordering::AcqRel);
            take(block);
        });
        if taken { Ok(()) } else { Err(Error::OutOfBlocks { needed: count, available: self.num_free() }) }
    }

    /// Adds a reference to a block that has one, or that is cached and protected from eviction by the caller.
    pub(crate) fn retain(&self, block: BlockId) {
        self.word(block).fetch_add(1, Ordering::AcqRel);
    }

    /// Gives one reference to each of `blocks` back, the last block first.
    pub(crate) fn release(&self, blocks: &[BlockId]) {
        let (mut free, mut idle) = (Chain::new(), Chain::new());
        for &block in blocks.iter().rev() {
            let word = self.word(block);
            let now = word.fetch_sub(1, Ordering::AcqRel) - 1;
            if now & REFERENCES != 0 {
                continue;
            }
            if now & PUBLISHED == 0 {
                self.inner.free.link(&mut free, block);
            } else if word.fetch_or(RETURNED, Ordering::AcqRel) & RETURNED == 0 {
                self.inner.returned.link(&mut idle, block);
            }
        }
        self.inner.free.push_chain(free);
        self.inner.returned.push_chain(idle);
    }

    /// Makes a block findable. The caller holds a reference.
    pub(crate) fn publish(&self, block: BlockId) {
        self.word(block).fetch_or(PUBLISHED, Ordering::AcqRel);
    }

    /// Takes blocks out of the tree. Those that nobody uses become free, all together at the end, the last one on top.
    pub(crate) fn unpublish(&self, blocks: impl IntoIterator<Item = BlockId>) {
        let mut free = Chain::new();
        for block in blocks {
            let before = self.word(block).fetch_and(!PUBLISHED, Ordering::AcqRel);
            if before & PUBLISHED != 0 && before & REFERENCES == 0 {
                self.inner.free.link(&mut free, block);
            }
        }
        self.inner.free.push_chain(free);
    }

    /// Hands out the blocks whose last reference was given back since the last call, in an order in which a block comes
    /// after the blocks that follow it in its sequence. The caller must look whether they are still idle.
    pub(crate) fn take_returned(&self, returned: &mut Vec<BlockId>) {
        returned.clear();
        self.inner.returned.take_all(|block| returned.push(block));
        returned.reverse();
        for &block in returned.iter() {
            self.word(block).fetch_and(!RETURNED, Ordering::AcqRel);
        }
    }

    /// Whether a block is published and nobody uses it.
    pub(crate) fn is_idle(&self, block: BlockId) -> bool {
        self.word(block).load(Ordering::Acquire) & !RETURNED == PUBLISHED
    }

    fn word(&self, block: BlockId) -> &AtomicU32 {
        &self.inner.words[block.index()]
    }
}

impl std::fmt::Debug for BlockPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("BlockPool").field("counts", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pool() -> BlockPool {
        BlockPool::new(5, BlockSize::new(4).unwrap()).unwrap()
    }

    fn take(pool: &BlockPool, count: usize) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        pool.allocate(count, |block| blocks.push(block)).unwrap();
        blocks
    }

    #[test]
    fn allocate_more_than_free_takes_nothing() {
        let pool = pool();
        let error = pool.allocate(5, |_| panic!("nothing may be taken")).unwrap_err();
        assert_eq!(error, Error::OutOfBlocks { needed: 5, available: 4 });
        assert_eq!(pool.count().free, 4);
    }

    #[test]
    fn a_private_block_is_free_after_its_last_reference() {
        let pool = pool();
        let blocks = take(&pool, 2);
        pool.retain(blocks[0]);
        pool.release(&blocks);
        assert_eq!(pool.count(), BlockCounts { free: 3, cached: 0, active: 1, total: 4 });
        pool.release(&blocks[..1]);
        assert_eq!(pool.count().free, 4);
    }

    #[test]
    fn a_published_block_is_cached_after_its_last_reference() {
        let pool = pool();
        let blocks = take(&pool, 1);
        pool.publish(blocks[0]);
        pool.release(&blocks);
        assert_eq!(pool.count(), BlockCounts { free: 3, cached: 1, active: 0, total: 4 });
        let mut returned = Vec::new();
        pool.take_returned(&mut returned);
        assert_eq!(returned, blocks);
        pool.unpublish([blocks[0]]);
        assert_eq!(pool.count().free, 4);
    }

    #[test]
    fn blocks_return_deepest_first() {
        let pool = pool();
        let blocks = take(&pool, 3);
        blocks.iter().for_each(|&block| pool.publish(block));
        pool.release(&blocks);
        let mut returned = Vec::new();
        pool.take_returned(&mut returned);
        assert_eq!(returned, blocks.iter().rev().copied().collect::<Vec<_>>());
    }

    #[test]
    fn a_block_that_is_used_and_returned_twice_before_adoption_is_handed_out_once() {
        let pool = pool();
        let blocks = take(&pool, 1);
        pool.publish(blocks[0]);
        pool.release(&blocks);
        pool.retain(blocks[0]);
        pool.release(&blocks);
        let mut returned = Vec::new();
        pool.take_returned(&mut returned);
        assert_eq!(returned, blocks);
    }

    #[test]
    fn a_pool_without_room_for_a_block_is_refused() {
        assert!(BlockPool::new(1, BlockSize::new(4).unwrap()).is_err());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::thread;

    #[test]
    fn loom_a_returned_block_is_adopted_exactly_once_however_pins_and_releases_interleave() {
        loom::model(|| {
            let pool = BlockPool::new(2, BlockSize::new(1).unwrap()).unwrap();
            let mut block = BlockId::NULL;
            pool.allocate(1, |taken| block = taken).unwrap();
            pool.publish(block);
            let other = {
                let pool = pool.clone();
                thread::spawn(move || pool.release(&[block]))
            };
            let mut returned = Vec::new();
            let mut adopted = 0;
            for _ in 0..2 {
                pool.take_returned(&mut returned);
                adopted += returned.iter().filter(|&&block| pool.is_idle(block)).count();
            }
            other.join().unwrap();
            pool.take_returned(&mut returned);
            adopted += returned.iter().filter(|&&block| pool.is_idle(block)).count();
            assert_eq!(adopted, 1);
            assert_eq!(pool.count().cached, 1);
        });
    }

    #[test]
    fn loom_the_last_of_two_references_frees_a_block_once() {
        loom::model(|| {
            let pool = BlockPool::new(2, BlockSize::new(1).unwrap()).unwrap();
            let mut block = BlockId::NULL;
            pool.allocate(1, |taken| block = taken).unwrap();
            pool.retain(block);
            let other = {
                let pool = pool.clone();
                thread::spawn(move || pool.release(&[block]))
            };
            pool.release(&[block]);
            other.join().unwrap();
            assert_eq!(pool.count().free, 1);
            assert_eq!(pool.num_free(), 1);
        });
    }
}
