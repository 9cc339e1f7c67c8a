//! Least recently used first, except that what is known to be over goes before it: what that knowledge is worth.

use std::convert::Infallible;

use super::ranked::{Ranking, Use};
use crate::future::{Future, NEVER};
use crate::trace::Trace;

/// Ranks of what is over lie below all others.
pub(super) const OVER: f64 = -1e12;

/// Knows exactly which blocks are never used again.
#[derive(Debug)]
pub struct UnusedAgain {
    future: Future,
}

impl UnusedAgain {
    /// Looks into a trace's future, as it matters to a pool of `num_blocks` blocks.
    pub fn new(trace: &Trace, num_blocks: usize) -> Self {
        Self { future: Future::new(trace, num_blocks) }
    }
}

impl Ranking for UnusedAgain {
    type Error = Infallible;

    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> Result<(), Infallible> {
        let request = used.request as f64;
        let rank = |next| if next == NEVER { OVER + request } else { request };
        ranks.extend(self.future.next_uses(used.request).map(rank));
        Ok(())
    }
}
