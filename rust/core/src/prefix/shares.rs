//! Tenants' shares of the cache: how many idle blocks that a tenant alone has used may stay before they go first.

use hashbrown::HashMap;

use super::PrefixCache;
use crate::error::{Error, Result};

/// Whose a block is, by who has given it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// Nobody has given it back yet.
    Nobody,
    /// One tenant alone has used it.
    Tenant(u32),
    /// Several have.
    Several,
}

#[derive(Debug)]
struct Tenant {
    bytes: Box<[u8]>,
    /// Leases, and nodes that it owns.
    users: usize,
}

/// The tenants that have leases or blocks, and what share each may have.
#[derive(Debug)]
pub(super) struct Shares {
    /// The share of the pool that a tenant's idle blocks may fill; 1: shares are not kept.
    share: f64,
    are_kept: bool,
    /// Those that were set for one tenant and differ. The rest of what is kept of a tenant goes with its last user.
    own: HashMap<Box<[u8]>, f64>,
    tenants: HashMap<Box<[u8]>, u32>,
    entries: Vec<Option<Tenant>>,
    vacant: Vec<u32>,
}

impl Shares {
    pub(super) fn new(share: f64) -> Self {
        Self {
            share,
            are_kept: share < 1.0,
            own: HashMap::new(),
            tenants: HashMap::new(),
            entries: Vec::new(),
            vacant: Vec::new(),
        }
    }

    pub(super) fn are_kept(&self) -> bool {
        self.are_kept
    }

    /// The number of a tenant, with one more user, and, if it had none, its share.
    fn enter(&mut self, bytes: &[u8]) -> (u32, Option<f64>) {
        if let Some(&tenant) = self.tenants.get(bytes) {
            self.join(tenant);
            return (tenant, None);
        }
        let tenant = self.vacant.pop().unwrap_or(self.entries.len() as u32);
        let entry = Some(Tenant { bytes: bytes.into(), users: 1 });
        match self.entries.get_mut(tenant as usize) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        self.tenants.insert(bytes.into(), tenant);
        (tenant, Some(self.own.get(bytes).copied().unwrap_or(self.share)))
    }

    fn join(&mut self, tenant: u32) {
        self.entries[tenant as usize].as_mut().expect("a tenant in use has an entry").users += 1;
    }

    /// Ends one use of a tenant's number.
    pub(super) fn leave(&mut self, tenant: u32) {
        let place = &mut self.entries[tenant as usize];
        let entry = place.as_mut().expect("a tenant in use has an entry");
        entry.users -= 1;
        if entry.users == 0 {
            self.tenants.remove(&entry.bytes);
            *place = None;
            self.vacant.push(tenant);
        }
    }

    /// Counts a node for its owner.
    pub(super) fn change_owner(&mut self, before: Owner, after: Owner) {
        if before == after {
            return;
        }
        if let Owner::Tenant(tenant) = after {
            self.join(tenant);
        }
        if let Owner::Tenant(tenant) = before {
            self.leave(tenant);
        }
    }
}

impl PrefixCache {
    /// Sets the share of the pool, from 0 to 1, that a tenant's own idle blocks may fill before they go first. A block
    /// that several tenants have used is nobody's own.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if the share is out of its range.
    pub fn set_share(&mut self, tenant: &[u8], share: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::request("share", share, "0 to 1"));
        }
        // What was given back before stands by the share of before, whether or not somebody has looked since.
        self.adopt_returned();
        let shares = &mut self.tracked.shares;
        if share == shares.share {
            shares.own.remove(tenant);
        } else {
            (self.tracked.is_active, shares.are_kept) = (true, true);
            shares.own.insert(tenant.into(), share);
        }
        if let Some(&id) = shares.tenants.get(tenant) {
            self.order.set_limit(id, self.blocks_of(share));
        }
        Ok(())
    }

    /// Idle blocks that a tenant alone has used, where shares are kept.
    pub fn owned_blocks(&mut self, tenant: &[u8]) -> usize {
        self.adopt_returned();
        self.tracked.shares.tenants.get(tenant).map_or(0, |&tenant| self.order.owned(tenant))
    }

    /// The number of a tenant, with one more user.
    pub(super) fn enter_tenant(&mut self, bytes: &[u8]) -> u32 {
        let (tenant, share) = self.tracked.shares.enter(bytes);
        if let Some(share) = share {
            let limit = self.blocks_of(share);
            self.order.set_limit(tenant, limit);
        }
        tenant
    }

    fn blocks_of(&self, share: f64) -> usize {
        (share * (self.pool.num_blocks() - 1) as f64).floor() as usize
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::pool::BlockPool;
    use crate::prefix::{CacheOptions, Retention};
    use crate::units::BlockSize;

    #[test]
    fn a_share_that_is_set_back_is_forgotten_and_others_take_little() {
        let pool = BlockPool::new(16, BlockSize::new(4).unwrap()).unwrap();
        let options = CacheOptions { tenant_share: 1.0, ..CacheOptions::default() };
        let mut cache = PrefixCache::with_options(pool, &[crate::LayerGroup::Full], options).unwrap();
        for tenant in 0..1000_u32 {
            cache.set_share(&tenant.to_le_bytes(), 0.5).unwrap();
        }
        assert_eq!((cache.tracked.shares.own.len(), cache.tracked.shares.entries.len()), (1000, 0));
        let lease = cache.open_lease(&Retention { tenant: &7_u32.to_le_bytes(), ..Retention::default() });
        assert_eq!(cache.tracked.shares.entries.len(), 1);
        for tenant in 0..1000_u32 {
            cache.set_share(&tenant.to_le_bytes(), 1.0).unwrap();
        }
        cache.close_lease(lease, 0.0);
        assert!(cache.tracked.shares.own.is_empty() && cache.tracked.shares.tenants.is_empty());
    }
}
