//! Resets of the cache.

use crate::support::Engine;

impl Engine {
    /// Makes nothing findable of what was computed so far.
    pub(crate) fn reset(&mut self) {
        self.scheduler.reset_prefix_cache();
        self.scheduler.check().unwrap();
        self.ages.now += 1;
    }
}
