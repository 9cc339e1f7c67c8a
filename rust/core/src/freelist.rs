//! A lock-free list of block ids: an array of successors and one tagged head.
//!
//! ```text
//! head: [ tag: 32 bits | first id: 32 bits ]      next[id] = the id after it
//! ```
//! Every change of the head raises the tag, so that a head that was read earlier and looks the same again is not taken
//! for unchanged (ABA). Ids are indices, never pointers: a stale read yields a wrong id, which the compare-and-swap then
//! refuses, and no invalid memory. One compare-and-swap moves any number of blocks.
//!
//! Source: R. K. Treiber, *Systems Programming: Coping with Parallelism*, 1986; the tag as in IBM System/370's
//! double-word compare-and-swap.

use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Backoff, Ordering};
use crate::units::BlockId;

/// No block: block 0 is never in a list.
const END: u32 = 0;

/// A lock-free stack of block ids.
///
/// What threads contend for lies on one cache line, and nothing else does.
#[repr(align(64))]
pub struct FreeList {
    head: AtomicU64,
    next: Box<[AtomicU32]>,
    /// Never more than the list holds: lowered before blocks are taken, raised after they were given back.
    available: AtomicUsize,
}

/// Blocks that were linked to each other and belong to nobody else, ready to be pushed at once.
#[derive(Debug)]
pub struct Chain {
    first: u32,
    last: u32,
    len: usize,
}

impl Chain {
    /// A chain of no blocks.
    pub const fn new() -> Self {
        Self { first: END, last: END, len: 0 }
    }

    /// How many blocks were linked.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether no block was linked.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Default for Chain {
    fn default() -> Self {
        Self::new()
    }
}

const fn pack(tag: u32, first: u32) -> u64 {
    ((tag as u64) << 32) | first as u64
}

const fn first_of(head: u64) -> u32 {
    head as u32
}

const fn after(head: u64, first: u32) -> u64 {
    pack(((head >> 32) as u32).wrapping_add(1), first)
}

impl FreeList {
    /// An empty list that can hold the blocks `1..num_blocks`.
    pub fn empty(num_blocks: usize) -> Self {
        Self {
            head: AtomicU64::new(pack(0, END)),
            next: (0..num_blocks).map(|_| AtomicU32::new(END)).collect(),
            available: AtomicUsize::new(0),
        }
    }

    /// A list of all the blocks `1..num_blocks`, the lowest on top.
    pub fn full(num_blocks: usize) -> Self {
        let list = Self::empty(num_blocks);
        let mut chain = Chain::new();
        for id in (1..num_blocks as u32).rev() {
            list.link(&mut chain, BlockId::new(id));
        }
        list.push_chain(chain);
        list
    }

    /// Blocks that can be taken at this moment.
    pub fn available(&self) -> usize {
        self.available.load(Ordering::Acquire)
    }

    /// Puts a block on top of a chain. The caller owns the block: it is in no list.
    pub fn link(&self, chain: &mut Chain, block: BlockId) {
        self.next[block.index()].store(chain.first, Ordering::Relaxed);
        if chain.is_empty() {
            chain.last = block.get();
        }
        chain.first = block.get();
        chain.len += 1;
    }

    /// Gives one block back.
    pub fn push(&self, block: BlockId) {
        let mut chain = Chain::new();
        self.link(&mut chain, block);
        self.push_chain(chain);
    }

    /// Gives a chain of blocks back, with one compare-and-swap.
    pub fn push_chain(&self, chain: Chain) {
        if chain.is_empty() {
            return;
        }
        let (mut head, mut backoff) = (self.head.load(Ordering::Relaxed), Backoff::new());
        loop {
            self.next[chain.last as usize].store(first_of(head), Ordering::Relaxed);
            // Release: who takes these blocks sees their links and all that was written before.
            match self.head.compare_exchange_weak(
                head,
                after(head, chain.first),
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(_) => {
                    backoff.wait();
                    head = self.head.load(Ordering::Relaxed);
                }
            }
        }
        self.available.fetch_add(chain.len, Ordering::Release);
    }

    /// Takes one block, or none if the list is empty.
    pub fn pop(&self) -> Option<BlockId> {
        let mut taken = None;
        self.pop_chain(1, |block| taken = Some(block));
        taken
    }

    /// Takes `count` blocks with one compare-and-swap and hands them to `take` in order, or takes none.
    ///
    /// Returns whether they were taken.
    pub fn pop_chain(&self, count: usize, mut take: impl FnMut(BlockId)) -> bool {
        if count == 0 {
            return true;
        }
        if !self.reserve(count) {
            return false;
        }
        // `count` blocks are in the list and kept for us: only a change of the head in between makes us look again.
        let (first, _) = self.detach(count);
        let mut id = first;
        for _ in 0..count {
            take(BlockId::new(id));
            id = self.next[id as usize].load(Ordering::Relaxed);
        }
        true
    }

    /// Takes all blocks and hands them to `take`, the one pushed last first.
    pub fn take_all(&self, mut take: impl FnMut(BlockId)) {
        let count = self.available();
        if count > 0 {
            self.pop_chain(count, &mut take);
        }
    }

    /// Lowers `available` by `count`, if it is that much.
    fn reserve(&self, count: usize) -> bool {
        self.available
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |available| available.checked_sub(count))
            .is_ok()
    }

    /// Swings the head past the first `count` blocks; returns the first and the last of them.
    fn detach(&self, count: usize) -> (u32, u32) {
        let mut backoff = Backoff::new();
        loop {
            let head = self.head.load(Ordering::Acquire);
            if let Some((last, rest)) = self.walk(first_of(head), count)
                && self
                    .head
                    .compare_exchange(head, after(head, rest), Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return (first_of(head), last);
            }
            backoff.wait();
        }
    }

    /// The `count`-th block from `first` on and the one after it; none if the links end early (they changed meanwhile).
    fn walk(&self, first: u32, count: usize) -> Option<(u32, u32)> {
        let mut last = first;
        for _ in 1..count {
            if last == END {
                return None;
            }
            last = self.next[last as usize].load(Ordering::Relaxed);
        }
        (last != END).then(|| (last, self.next[last as usize].load(Ordering::Relaxed)))
    }
}

impl std::fmt::Debug for FreeList {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FreeList").field("available", &self.available()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pop_all(list: &FreeList) -> Vec<u32> {
        let mut ids = Vec::new();
        list.take_all(|block| ids.push(block.get()));
        ids
    }

    #[test]
    fn full_list_hands_out_every_block_but_the_null_block_once() {
        let list = FreeList::full(6);
        assert_eq!(pop_all(&list), [1, 2, 3, 4, 5]);
        assert_eq!(list.pop(), None);
    }

    #[test]
    fn pop_chain_beyond_what_is_there_takes_nothing() {
        let list = FreeList::full(4);
        assert!(!list.pop_chain(4, |_| panic!("nothing may be taken")));
        assert_eq!(list.available(), 3);
    }

    #[test]
    fn a_pushed_chain_comes_back_in_its_order() {
        let list = FreeList::empty(10);
        let mut chain = Chain::new();
        for id in [7, 3, 9] {
            list.link(&mut chain, BlockId::new(id));
        }
        list.push_chain(chain);
        assert_eq!(pop_all(&list), [9, 3, 7]);
    }

    #[test]
    fn an_empty_pool_has_an_empty_list() {
        assert_eq!(FreeList::full(1).pop(), None);
        assert_eq!(FreeList::full(0).available(), 0);
    }

    #[test]
    fn threads_that_take_and_give_back_lose_and_double_nothing() {
        let list = FreeList::full(65);
        std::thread::scope(|scope| {
            for size in [1, 2, 5, 16] {
                let list = &list;
                scope.spawn(move || {
                    for _ in 0..5_000 {
                        let mut mine = Vec::with_capacity(size);
                        if list.pop_chain(size, |block| mine.push(block)) {
                            assert_eq!(mine.len(), size);
                            let mut chain = Chain::new();
                            mine.iter().for_each(|&block| list.link(&mut chain, block));
                            list.push_chain(chain);
                        }
                    }
                });
            }
        });
        let mut ids = pop_all(&list);
        ids.sort_unstable();
        assert_eq!(ids, (1..65).collect::<Vec<_>>());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;
    use loom::thread;

    fn taken(list: &FreeList, count: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        list.pop_chain(count, |block| ids.push(block.get()));
        ids
    }

    fn give(list: &FreeList, ids: &[u32]) {
        let mut chain = Chain::new();
        ids.iter().for_each(|&id| list.link(&mut chain, BlockId::new(id)));
        list.push_chain(chain);
    }

    #[test]
    fn loom_two_threads_never_hold_the_same_block() {
        loom::model(|| {
            let list = Arc::new(FreeList::full(4));
            let other = {
                let list = Arc::clone(&list);
                thread::spawn(move || taken(&list, 2))
            };
            let mut ids = taken(&list, 1);
            ids.extend(other.join().unwrap());
            ids.extend(taken(&list, list.available()));
            ids.sort_unstable();
            assert_eq!(ids, [1, 2, 3]);
        });
    }

    #[test]
    fn loom_a_block_popped_and_pushed_back_meanwhile_breaks_no_link() {
        loom::model(|| {
            let list = Arc::new(FreeList::full(4));
            let other = {
                let list = Arc::clone(&list);
                thread::spawn(move || {
                    let first = taken(&list, 1);
                    let second = taken(&list, 1);
                    give(&list, &first);
                    second
                })
            };
            let mut held = taken(&list, 1);
            held.extend(other.join().unwrap());
            held.extend(taken(&list, list.available()));
            held.sort_unstable();
            assert_eq!(held, [1, 2, 3]);
        });
    }
}
