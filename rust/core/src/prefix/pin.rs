//! Pins: cached prefixes that are kept whatever comes, up to a quota.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::{PrefixCache, ScopeId};
use crate::error::{Error, Result};
use crate::groups::Tables;
use crate::units::{BlockId, TokenId};

/// A pin: given once, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PinId(u64);

impl PinId {
    /// The pin with this number.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// The number that the caller knows the pin by.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Blocks that may be pinned. A block counts once for each pin that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinQuota {
    /// In all.
    pub blocks: usize,
    /// By one tenant.
    pub blocks_per_tenant: usize,
}

/// What a pin holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The pin.
    pub pin: PinId,
    /// The first tokens whose blocks it holds.
    pub num_tokens: usize,
    /// Those blocks, over all groups.
    pub num_blocks: usize,
}

#[derive(Debug)]
struct Pin {
    tenant: Box<[u8]>,
    tables: Tables,
    num_blocks: usize,
}

/// All pins.
#[derive(Debug)]
pub(super) struct Pins {
    quota: PinQuota,
    pins: BTreeMap<PinId, Pin>,
    by_tenant: HashMap<Box<[u8]>, usize>,
    num_blocks: usize,
    next: u64,
}

impl Pins {
    pub(super) fn new(quota: PinQuota) -> Self {
        Self { quota, pins: BTreeMap::new(), by_tenant: HashMap::new(), num_blocks: 0, next: 0 }
    }

    /// Gives all pins up.
    pub(super) fn clear(&mut self) {
        self.pins.clear();
        self.by_tenant.clear();
        self.num_blocks = 0;
    }

    fn check_quota(&self, tenant: &[u8], asked: usize) -> Result<()> {
        let PinQuota { blocks, blocks_per_tenant } = self.quota;
        let own = self.by_tenant.get(tenant).copied().unwrap_or(0);
        for (whose, option, held, limit) in [
            ("", "max_pinned_blocks", self.num_blocks, blocks),
            ("the tenant's ", "max_pinned_blocks_per_tenant", own, blocks_per_tenant),
        ] {
            if held + asked > limit {
                return Err(Error::PinQuota { whose, option, held, asked, limit });
            }
        }
        Ok(())
    }
}

impl PrefixCache {
    /// Pins the cached blocks that `tokens` begin with: they are neither evicted nor counted as available until
    /// [`unpin`](Self::unpin), or a reset. Returns none if nothing is cached.
    ///
    /// # Errors
    /// [`Error::PinQuota`]; nothing was pinned.
    pub fn pin_prefix(
        &mut self,
        scope: ScopeId,
        tokens: &[TokenId],
        tenant: &[u8],
    ) -> Result<Option<Pinned>> {
        let hits = self.probe(scope, tokens, usize::MAX).hits;
        // What a step in flight is to compute may be withdrawn.
        let computed = self.path[..hits].iter().take_while(|&&node| self.tree.is_computed(node)).count();
        let hits = if computed < hits { self.probe(scope, tokens, computed).hits } else { hits };
        if hits == 0 {
            return Ok(None);
        }
        let num_blocks = (0..self.groups.len()).map(|group| hits - self.first_pinned(group, hits)).sum();
        self.pins.check_quota(tenant, num_blocks)?;
        let (tables, _) = self.share(scope, tokens, hits);
        let pin = PinId(self.pins.next);
        self.pins.next += 1;
        self.pins.num_blocks += num_blocks;
        *self.pins.by_tenant.entry(tenant.into()).or_insert(0) += num_blocks;
        self.pins.pins.insert(pin, Pin { tenant: tenant.into(), tables, num_blocks });
        Ok(Some(Pinned { pin, num_tokens: hits * self.pool.block_size().tokens(), num_blocks }))
    }

    /// Gives a pin up. Returns whether there was one.
    pub fn unpin(&mut self, pin: PinId) -> bool {
        let Some(Pin { tenant, num_blocks, .. }) = self.pins.pins.remove(&pin) else { return false };
        self.pins.num_blocks -= num_blocks;
        let own = self.pins.by_tenant.get_mut(&tenant).expect("a pin counts for its tenant");
        *own -= num_blocks;
        if *own == 0 {
            self.pins.by_tenant.remove(&tenant);
        }
        true
    }

    /// Blocks that pins hold, one for each pin that holds it.
    pub fn pinned_blocks(&self) -> usize {
        self.pins.num_blocks
    }

    /// Loses all pins without giving their blocks back: what must never happen, for a test of who notices.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn leak_pins(&mut self) {
        std::mem::forget(std::mem::take(&mut self.pins.pins));
    }

    /// Each block that a pin holds, once for each pin.
    pub(crate) fn iter_pinned(&self) -> impl Iterator<Item = BlockId> {
        self.pins.pins.values().flat_map(|pin| &pin.tables).flat_map(|table| table.held()).copied()
    }
}
