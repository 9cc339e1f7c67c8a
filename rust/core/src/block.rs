//! Single blocks, their state as a type: what a user of the pool without a scheduler holds.
//!
//! ```text
//! BlockPool::take ─▶ Writable ──share──▶ Shared ──clone──▶ Shared …
//!                        ▲                  │
//!                        └──into_writable───┘   (only the sole holder)
//! ```
//! A block that is written has one owner:
//! ```
//! # use pykv_core::{BlockPool, BlockSize};
//! let pool = BlockPool::new(8, BlockSize::new(16)?)?;
//! let block = pool.take()?;
//! let shared = block.share();
//! let reader = shared.clone();
//! assert_eq!(pool.references(reader.id()), 2);
//! # Ok::<(), pykv_core::Error>(())
//! ```
//! and cannot be written once it is shared:
//! ```compile_fail
//! # use pykv_core::{BlockPool, BlockSize};
//! let pool = BlockPool::new(8, BlockSize::new(16)?)?;
//! let block = pool.take()?;
//! let shared = block.share();
//! let writer = block.id(); // `block` is gone
//! # Ok::<(), pykv_core::Error>(())
//! ```

use crate::error::Result;
use crate::pool::BlockPool;
use crate::units::BlockId;

/// One reference to one block, given back when dropped.
#[derive(Debug)]
struct Lease {
    pool: BlockPool,
    id: BlockId,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.release(&[self.id]);
    }
}

/// A block with one owner, who may write its slots.
#[derive(Debug)]
pub struct Writable(Lease);

/// A block that is only read. A clone is one more reference.
#[derive(Debug)]
pub struct Shared(Lease);

impl BlockPool {
    /// Takes one free block.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks) if none is free.
    pub fn take(&self) -> Result<Writable> {
        let mut id = BlockId::NULL;
        self.allocate(1, |block| id = block)?;
        Ok(Writable(Lease { pool: self.clone(), id }))
    }
}

impl Writable {
    /// The block's number.
    pub fn id(&self) -> BlockId {
        self.0.id
    }

    /// Ends the writing: from here on the block can be shared.
    pub fn share(self) -> Shared {
        Shared(self.0)
    }
}

impl Shared {
    /// The block's number.
    pub fn id(&self) -> BlockId {
        self.0.id
    }

    /// Makes the block writable again, or gives it back unchanged if somebody else holds it too.
    ///
    /// # Errors
    /// The block itself, as it was.
    pub fn into_writable(self) -> std::result::Result<Writable, Self> {
        if self.0.pool.references(self.0.id) == 1 { Ok(Writable(self.0)) } else { Err(self) }
    }
}

impl Clone for Shared {
    fn clone(&self) -> Self {
        self.0.pool.retain(self.0.id);
        Self(Lease { pool: self.0.pool.clone(), id: self.0.id })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::units::BlockSize;

    #[test]
    fn a_dropped_block_is_free_again() {
        let pool = BlockPool::new(3, BlockSize::new(1).unwrap()).unwrap();
        let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
        assert!(pool.take().is_err());
        drop(first);
        assert_ne!(pool.take().unwrap().id(), second.id());
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    fn only_the_sole_holder_of_a_shared_block_may_write_again() {
        let pool = BlockPool::new(2, BlockSize::new(1).unwrap()).unwrap();
        let shared = pool.take().unwrap().share();
        let reader = shared.clone();
        let shared = shared.into_writable().unwrap_err();
        drop(reader);
        assert!(shared.into_writable().is_ok());
    }
}
