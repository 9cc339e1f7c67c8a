//! Whether a step is in flight, for the arrays that it was written into: they outlive it, and serve other schedulers too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const NONE: u64 = u64::MAX;

/// The plan that a step's lists hold while it is in flight.
#[derive(Debug)]
pub(super) struct Watched(Arc<AtomicU64>);

impl Default for Watched {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(NONE)))
    }
}

impl Watched {
    pub(super) fn begin(&self, plan: u64) {
        self.0.store(plan, Ordering::Release);
    }

    pub(super) fn end(&self) {
        self.0.store(NONE, Ordering::Release);
    }

    /// Who looks whether a plan is in flight.
    pub(super) fn watch(&self, plan: u64) -> Watch {
        Watch { watched: self.0.clone(), plan }
    }
}

/// A scheduler that is dropped takes its steps along.
impl Drop for Watched {
    fn drop(&mut self) {
        self.end();
    }
}

/// A plan that was written into some arrays.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    watched: Arc<AtomicU64>,
    plan: u64,
}

impl Watch {
    /// The plan, as long as it is in flight.
    pub(super) fn plan_in_flight(&self) -> Option<u64> {
        (self.watched.load(Ordering::Acquire) == self.plan).then_some(self.plan)
    }
}
