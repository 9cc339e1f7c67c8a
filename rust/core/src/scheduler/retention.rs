//! What the cache keeps once requests have ended: sessions, pins and shares.

use super::Scheduler;
use super::sequence::SeqIndex;
use crate::error::Result;
use crate::prefix::{PinId, Pinned};
use crate::units::TokenId;

impl Scheduler {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::prefix::PinQuota;
    use crate::scheduler::{Outcome, OwnedArrays, Sampled, SchedulerConfig, Submission, TableSync};

    #[test]
    fn a_leaked_pin_is_found() {
        let pin_quota = PinQuota { blocks: 4, blocks_per_tenant: 4 };
        let config =
            SchedulerConfig { num_blocks: 16, block_size: 4, pin_quota, ..SchedulerConfig::default() };
        let mut scheduler = Scheduler::new(config.clone()).unwrap();
        let (mut arrays, tokens) = (OwnedArrays::new(&config), [7; 9]);
        scheduler.submit(Submission { max_tokens: Some(1), ..Submission::new(&tokens) }).unwrap();
        let plan = scheduler.plan(&arrays.borrow(), &mut TableSync::default(), 0.0).unwrap().unwrap();
        assert_eq!(
            scheduler.pin(&tokens, b"", b"").unwrap(),
            None,
            "a step in flight has cached nothing yet"
        );
        let sampled = Sampled { tokens: &[1], outcomes: &[Outcome::Ok], failed_rows: &[], accepted: None };
        scheduler.apply(plan.id, sampled, |_, _| ()).unwrap();
        assert_eq!(scheduler.pin(&tokens, b"", b"").unwrap().unwrap().num_blocks, 2);
        scheduler.check().unwrap();
        scheduler.cache.leak_pins();
        assert!(scheduler.check().unwrap_err().to_string().contains("I3 references"));
    }
}
