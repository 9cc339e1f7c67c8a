//! What can be seen from outside of what is cached: how much of a prompt, and the events about it.

use super::Scheduler;
use crate::prefix::Events;
use crate::units::{RequestId, TokenId};

impl Scheduler {
    /// How many of the first `tokens` a request would find cached in a scope now. Changes nothing.
    pub fn cached_tokens(&mut self, tokens: &[TokenId], scope: &[u8]) -> usize {
        let scope = self.cache.enter_scope(scope);
        let hits = self.cache.probe(scope, tokens, usize::MAX).hits;
        self.cache.leave_scope(scope);
        hits * self.block_size.tokens()
    }

    /// How many tokens of its prompt a live request found cached, as its summary will say: 0 before its first step was
    /// applied. None if it has ended.
    pub fn num_cached_tokens(&self, request: RequestId) -> Option<usize> {
        self.requests.get(&request).map(|entry| entry.summary.cached_tokens)
    }

    /// Takes the events about cached blocks since the last call. Empty if none are kept.
    pub fn take_events(&mut self) -> Events {
        self.cache.take_events()
    }

    /// All cached blocks, as if each had just been stored. Empty if no events are kept.
    pub fn snapshot_events(&self) -> Events {
        self.cache.snapshot_events()
    }
}
