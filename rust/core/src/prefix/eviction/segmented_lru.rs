//! Blocks that no hit has found yet go before those that were found: one pass over many new prompts cannot push out what
//! is used again and again.
//!
//! Source: R. Karedla, J. S. Love, B. G. Wherry, *Caching Strategies to Improve Disk System Performance*, IEEE Computer
//! 27(3), 1994: segmented LRU.

use super::EvictionPolicy;

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// Blocks of the pool that may be protected, in percent: the least recently used beyond that are on probation again.
const PROTECTED_PERCENT: usize = 80;

/// Least recently used first, in two segments.
#[derive(Debug)]
pub struct SegmentedLru;

impl EvictionPolicy for SegmentedLru {
    fn name(&self) -> &'static str {
        "segmented_lru"
    }

    fn lane(&self, hits: u8) -> usize {
        if hits == 0 { PROBATION } else { PROTECTED }
    }

    fn is_overfull(&self, _lane: usize, lane_blocks: usize, pool_blocks: usize) -> bool {
        lane_blocks * 100 > pool_blocks * PROTECTED_PERCENT
    }
}
