//! One request at a time: its hits are the longest run of cached blocks that its prompt begins with, then all its blocks
//! are cached. What is in use is not evicted; output is not cached.
//!
//! Of a prompt that is longer than the pool only the first blocks that fit are cached.

mod bounds;
mod ended;
mod policy;
mod production;
mod ranked;
mod sessions;

pub use bounds::{infinite, optimum};
pub use ended::UnusedAgain;
pub use policy::Policy;
pub use production::production;
pub use ranked::{Ranking, Use, ranked};
pub use sessions::{End, SessionEnds};

use crate::trace::Trace;

/// What was found and what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Blocks that were found.
    pub blocks: u64,
    /// Tokens in them: a prompt's last block may be filled in part.
    pub tokens: u64,
    /// Blocks of all prompts.
    pub queried_blocks: u64,
    /// Tokens of all prompts.
    pub queried_tokens: u64,
    /// Cached blocks that made room for others.
    pub evictions: u64,
}

impl Hits {
    /// Counts what one request has found.
    fn count(&mut self, trace: &Trace, request: usize, found: usize) {
        let prompt_tokens = trace.requests()[request].prompt_tokens as usize;
        self.blocks += found as u64;
        self.tokens += (found * trace.block_size()).min(prompt_tokens) as u64;
        self.queried_blocks += trace.num_prompt_blocks(request) as u64;
        self.queried_tokens += prompt_tokens as u64;
    }
}

#[cfg(test)]
pub(crate) mod tests;
