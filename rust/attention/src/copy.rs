//! Copies whole blocks inside the caches.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::view::CacheView;
use crate::{Attention, Error};

/// The bytes below which one more thread is not worth its waking.
const THREAD_BYTES: usize = 1 << 18;

impl Attention {
    /// Copies, in every cache, each pair's first block to its second.
    ///
    /// # Errors
    /// A block is out of range; nothing was copied.
    ///
    /// # Safety
    /// The caches describe memory that is readable and writable for the whole call, at every index within their
    /// shapes, and share none. No block is the target of two pairs, or source and target.
    pub unsafe fn copy_blocks(
        &self,
        caches: &[CacheView],
        pairs: &[[i64; 2]],
        num_threads: usize,
    ) -> Result<(), Error> {
        // SAFETY: the same contract; a pair's blocks differ.
        unsafe { self.transfer_blocks(caches, caches, pairs, num_threads) }
    }

    /// Copies each pair's first block of every source cache to its second block of the target cache at the same place.
    ///
    /// # Errors
    /// A block is out of range, or a source and its target differ in more than the number of blocks and the strides;
    /// nothing was copied.
    ///
    /// # Safety
    /// The caches describe memory that is readable (the targets: writable) for the whole call, at every index within
    /// their shapes. No two targets share memory, nor does a copied block with the target of any pair. No block is the
    /// target of two pairs.
    pub unsafe fn transfer_blocks(
        &self,
        sources: &[CacheView],
        targets: &[CacheView],
        pairs: &[[i64; 2]],
        num_threads: usize,
    ) -> Result<(), Error> {
        check_caches(sources, targets)?;
        for (source, target) in sources.iter().zip(targets) {
            check_pairs([source, target], pairs)?;
        }
        let block_bytes = |cache: &CacheView| cache.num_kv_heads() * cache.block_size() * cache.row_bytes();
        let bytes = targets.iter().map(block_bytes).sum::<usize>() * pairs.len();
        let claims = AtomicUsize::new(0);
        let copy = |_| {
            loop {
                let place = claims.fetch_add(1, Ordering::Relaxed);
                let Some(target) = targets.get(place) else { return };
                for &[from, to] in pairs {
                    // SAFETY: both blocks lie in their caches, and no other thread has this target.
                    unsafe { copy_block(&sources[place], from as usize, target, to as usize) };
                }
            }
        };
        self.run(num_threads.min(1 + bytes / THREAD_BYTES), &copy)
    }
}

fn check_caches(sources: &[CacheView], targets: &[CacheView]) -> Result<(), Error> {
    let like = |cache: &CacheView| (cache.num_kv_heads(), cache.block_size(), cache.head_dim, cache.format);
    if sources.len() != targets.len() || sources.iter().map(like).ne(targets.iter().map(like)) {
        return Err(Error::Mismatch(
            "the blocks of a source and of its target must have the same shape and format",
        ));
    }
    Ok(())
}

/// A pair's first block must lie in the first cache, its second in the second.
fn check_pairs(caches: [&CacheView; 2], pairs: &[[i64; 2]]) -> Result<(), Error> {
    for (index, pair) in pairs.iter().enumerate() {
        for (&value, cache) in pair.iter().zip(caches) {
            let num_blocks = cache.num_blocks();
            if !usize::try_from(value).is_ok_and(|block| block < num_blocks) {
                return Err(Error::Pair { index, value, num_blocks });
            }
        }
    }
    Ok(())
}

/// # Safety
/// The blocks lie in their caches, which are alike; they share no memory, and no one else uses the second.
unsafe fn copy_block(source: &CacheView, from: usize, target: &CacheView, to: usize) {
    let [_, num_heads, block_size] = target.shape;
    let row_bytes = target.row_bytes();
    let slots_touch = [source, target].iter().all(|cache| cache.strides[2] == row_bytes as isize);
    let head_bytes = (block_size * row_bytes) as isize;
    let heads_touch = slots_touch && [source, target].iter().all(|cache| cache.strides[1] == head_bytes);
    let (heads, slots, bytes) = match (heads_touch, slots_touch) {
        (true, _) => (1, 1, num_heads * block_size * row_bytes),
        (_, true) => (num_heads, 1, block_size * row_bytes),
        _ => (num_heads, block_size, row_bytes),
    };
    for head in 0..heads {
        for slot in 0..slots {
            let (from, to) = (source.row(from, head, slot), target.row(to, head, slot));
            // SAFETY: the bytes lie in the two blocks, which share none.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
    }
}
