//! States of fixed size: linear attention, state space models and short convolutions keep one a sequence, however long
//! it is, and overwrite it with each token.
//!
//! All such layers of a model advance together, so one *slot* holds the states of all of them for one sequence. A
//! sequence that runs has a working slot. A *checkpoint* is a copy of a working slot at the end of a published block:
//! the prefix tree's node has it, and a prefix hit with states lands only where one is.
//!
//! ```text
//!             take            give back
//!   free ──────────▶ working ───────────▶ free
//!     │   begin                  keep                evict, or its node goes
//!     └──────────▶ being filled ──────▶ checkpoint ──────────────────────────▶ free
//!                        └─ give back ─▶ free          (or, while a step reads it, when that step is over)
//! ```
//! Slot 0 is the initial state: it is never handed out and never written.

mod arena;
mod recency;

pub use arena::{Home, StateArena, StateCounts};

/// A place for the states of one sequence, or for a checkpoint of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(u32);

impl StateSlot {
    /// What a sequence starts from that found nothing.
    pub const INITIAL: Self = Self(0);

    /// The slot with this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The slot's number: its place in the arena's tensors.
    pub const fn get(self) -> u32 {
        self.0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A copy of a slot. The source is not written and the target is not read by any other copy of the same list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// The slot that is read.
    pub source: StateSlot,
    /// The slot that is overwritten.
    pub target: StateSlot,
}
