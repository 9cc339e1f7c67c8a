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
        for cache in caches {
            check_pairs(cache, pairs)?;
        }
        let block_bytes = |cache: &CacheView| cache.num_kv_heads() * cache.block_size() * cache.row_bytes();
        let bytes = caches.iter().map(block_bytes).sum::<usize>() * pairs.len();
        let claims = AtomicUsize::new(0);
        let copy = |_| {
            while let Some(cache) = caches.get(claims.fetch_add(1, Ordering::Relaxed)) {
                for &[source, target] in pairs {
                    // SAFETY: both blocks lie in the cache, and no other thread has this cache.
                    unsafe { copy_block(cache, source as usize, target as usize) };
                }
            }
        };
        self.run(num_threads.min(1 + bytes / THREAD_BYTES), &copy)
    }
}

fn check_pairs(cache: &CacheView, pairs: &[[i64; 2]]) -> Result<(), Error> {
    let num_blocks = cache.num_blocks();
    for (index, pair) in pairs.iter().enumerate() {
        for &value in pair {
            if usize::try_from(value).is_ok_and(|block| block < num_blocks) {
                continue;
            }
            return Err(Error::Pair { index, value, num_blocks });
        }
    }
    Ok(())
}

/// # Safety
/// Both blocks lie in the cache, differ, and no one else uses them.
unsafe fn copy_block(cache: &CacheView, source: usize, target: usize) {
    let [_, num_heads, block_size] = cache.shape;
    let row_bytes = cache.row_bytes();
    let slots_touch = cache.strides[2] == row_bytes as isize;
    let heads_touch = slots_touch && cache.strides[1] == (block_size * row_bytes) as isize;
    let (heads, slots, bytes) = match (heads_touch, slots_touch) {
        (true, _) => (1, 1, num_heads * block_size * row_bytes),
        (_, true) => (num_heads, 1, block_size * row_bytes),
        _ => (num_heads, block_size, row_bytes),
    };
    for head in 0..heads {
        for slot in 0..slots {
            let (from, to) = (cache.row(source, head, slot), cache.row(target, head, slot));
            // SAFETY: the bytes lie in the two blocks, which differ.
            unsafe { to.copy_from_nonoverlapping(from, bytes) };
        }
    }
}
