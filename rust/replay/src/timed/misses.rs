//! Why a prompt's blocks were not found.

use crate::trace::{BlockNumber, Trace};

/// The blocks of prompts when their requests first started, by what became of the lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    /// Found.
    pub hit: u64,
    /// Nobody had asked for it before.
    pub never_seen: u64,
    /// Computed before, and evicted since.
    pub evicted: u64,
    /// Another request was about to compute it.
    pub not_yet_computed: u64,
    /// Not full, or with the prompt's last token, which is always computed.
    pub last: u64,
}

/// What was asked for and computed so far.
#[derive(Debug)]
pub(super) struct History {
    seen: Vec<State>,
    /// By reason, so far.
    pub(super) lookups: Lookups,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unknown,
    Asked,
    Computed,
}

impl History {
    /// Nothing was asked for.
    pub(super) fn new(trace: &Trace) -> Self {
        Self { seen: vec![State::Unknown; trace.num_blocks()], lookups: Lookups::default() }
    }

    /// A request starts, and found so many tokens.
    pub(super) fn start(&mut self, trace: &Trace, request: usize, cached_tokens: usize) {
        let size = trace.block_size();
        let prompt = trace.requests()[request].prompt_tokens as usize;
        let full = (prompt - 1) / size;
        let found = cached_tokens / size;
        self.lookups.hit += found as u64;
        self.lookups.last += (prompt.div_ceil(size) - full) as u64;
        for block in trace.blocks(request).take(full).skip(found) {
            *match std::mem::replace(self.state(block), State::Asked) {
                State::Unknown => &mut self.lookups.never_seen,
                State::Asked => &mut self.lookups.not_yet_computed,
                State::Computed => &mut self.lookups.evicted,
            } += 1;
        }
    }

    /// A request's tokens from `first` to `end` are computed.
    pub(super) fn compute(&mut self, trace: &Trace, request: usize, first: usize, end: usize) {
        let size = trace.block_size();
        let end = end.min(trace.requests()[request].prompt_tokens as usize) / size;
        for block in trace.blocks(request).take(end).skip(first / size) {
            *self.state(block) = State::Computed;
        }
    }

    fn state(&mut self, block: BlockNumber) -> &mut State {
        &mut self.seen[block as usize]
    }
}
