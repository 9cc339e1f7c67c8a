//! What the cache keeps once requests have ended: sessions, pins and shares.

use super::Scheduler;
use super::sequence::SeqIndex;
use crate::error::Result;
use crate::prefix::{PinId, Pinned};
use crate::units::TokenId;

impl Scheduler {
    /// How many of the first `tokens` a request would find cached in a scope now. Changes nothing.
    pub fn cached_tokens(&mut self, tokens: &[TokenId], scope: &[u8]) -> usize {
        let scope = self.cache.enter_scope(scope);
        let hits = self.cache.probe(scope, tokens, usize::MAX).hits;
        self.cache.leave_scope(scope);
        hits * self.block_size.tokens()
    }

    /// Says that a tenant's session has no further turn: cached blocks that only ended sessions have used make room
    /// before all others. A request of the session that comes all the same makes it live again. Returns whether it was.
    pub fn end_session(&mut self, tenant: &[u8], session: &[u8]) -> bool {
        self.cache.end_session(tenant, session)
    }

    /// Keeps the cached blocks that `tokens` begin with, whatever comes, until [`unpin`](Self::unpin) or a reset of the
    /// cache. Blocks of a step in flight are not cached yet. Returns none if nothing is cached.
    ///
    /// # Errors
    /// [`Error::PinQuota`](crate::Error::PinQuota); nothing was pinned.
    pub fn pin(&mut self, tokens: &[TokenId], scope: &[u8], tenant: &[u8]) -> Result<Option<Pinned>> {
        let scope = self.cache.enter_scope(scope);
        let pinned = self.cache.pin_prefix(scope, tokens, tenant);
        self.cache.leave_scope(scope);
        pinned
    }

    /// Gives a pin up. Returns whether there was one.
    pub fn unpin(&mut self, pin: PinId) -> bool {
        self.queue_changed = true;
        self.cache.unpin(pin)
    }

    /// Sets the share of the pool, from 0 to 1, that a tenant's own idle blocks may fill before they make room first.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`](crate::Error::InvalidRequest) if the share is out of its range.
    pub fn set_cache_share(&mut self, tenant: &[u8], share: f64) -> Result<()> {
        self.cache.set_share(tenant, share)
    }

    /// Notes for whom a sequence has used its blocks, before it gives them back.
    pub(super) fn mark_blocks(&mut self, index: SeqIndex) {
        let sequence = &self.sequences[index];
        if let Some(request) = self.requests.get(&sequence.key.request) {
            self.cache.mark(sequence.cursor, &request.lease);
        }
    }
}
