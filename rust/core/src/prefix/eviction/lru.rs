//! Least recently used first.

use super::EvictionPolicy;

/// All blocks in one lane.
#[derive(Debug)]
pub struct Lru;

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn lane(&self, _hits: u8) -> usize {
        0
    }
}
