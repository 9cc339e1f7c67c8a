//! Whether a waiting sequence may start.

/// What a sequence asks for and what there is.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// Blocks that must be taken anew: those of all its tokens, less the ones that are hit.
    pub new_blocks: usize,
    /// Hits that are idle now: pinning them takes them away from what can be evicted.
    pub idle_hits: usize,
    /// Blocks that are free or can be evicted.
    pub available: usize,
    /// Blocks that stay untouched, so that running sequences can grow.
    pub watermark: usize,
    /// Whether nothing runs: then there is nobody to keep room for.
    pub alone: bool,
}

impl Admission {
    /// Whether all that the sequence asks for can be given at once.
    pub fn fits(self) -> bool {
        let watermark = if self.alone { 0 } else { self.watermark };
        self.new_blocks + self.idle_hits + watermark <= self.available
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ASKS: Admission =
        Admission { new_blocks: 3, idle_hits: 2, available: 6, watermark: 1, alone: false };

    #[test]
    fn idle_hits_and_the_watermark_count() {
        assert!(ASKS.fits());
        assert!(!Admission { available: 5, ..ASKS }.fits());
    }

    #[test]
    fn alone_a_sequence_may_use_the_watermark() {
        assert!(Admission { available: 5, alone: true, ..ASKS }.fits());
        assert!(!Admission { available: 4, alone: true, ..ASKS }.fits());
    }
}
