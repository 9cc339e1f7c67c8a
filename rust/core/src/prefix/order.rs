//! Which idle block makes room next.
//!
//! 1. Blocks that only ended or expired sessions have used, before all others; blocks whose session said that its next
//!    turn is near, after all others.
//! 2. Among those that this does not tell apart: a tenant's own that holds more than its share of the cache.
//! 3. Then the lowest retention priority, then the policy's lowest lane, then what was used least recently.
//!
//! Each of these facts holds for a block at least as much as for those that hang below it, so that what goes next is
//! always a leaf. A block that comes to stand elsewhere while it is idle keeps the time of its last use; under a policy that
//! may move blocks itself it counts as used then.

use super::eviction::{EvictionPolicy, MAX_LANES, may_move_blocks};
use super::lanes::{LANES, Lanes};
use crate::units::BlockId;

/// Who waits for a block, if anybody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Only sessions that have ended have used it.
    Ended,
    /// Somebody may come back.
    #[default]
    Live,
    /// Somebody has said that he will, soon.
    Expected,
}

/// Retention priorities.
pub(crate) const PRIORITIES: usize = 5;

const CLASS_LANES: usize = PRIORITIES * MAX_LANES;
const _: () = assert!(3 * CLASS_LANES <= LANES, "a lane for each combination");

/// What decides where a block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) class: Class,
    /// Below [`PRIORITIES`].
    pub(crate) priority: u8,
    pub(crate) hits: u8,
    /// The tenant that alone has used it, if shares are kept.
    pub(crate) owner: Option<u32>,
}

/// The idle blocks of tenants, apart.
#[derive(Debug)]
struct Shares {
    lanes: Lanes,
    /// The idle blocks that each may have.
    limits: Vec<usize>,
    /// Those that have more, the one that loses blocks next at the end.
    over: Vec<u32>,
    is_over: Vec<bool>,
}

/// All idle blocks, in the order in which they go.
#[derive(Debug)]
pub(crate) struct EvictionOrder {
    lanes: Lanes,
    policy: &'static dyn EvictionPolicy,
    pool_blocks: usize,
    shares: Option<Box<Shares>>,
    /// Whether a lane's order is that of last uses: the policy moves no block.
    keeps_uses: bool,
    /// The number of the use at hand.
    used: u64,
}

impl EvictionOrder {
    pub(crate) fn new(num_blocks: usize, policy: &'static dyn EvictionPolicy) -> Self {
        let mut lanes = Lanes::new(num_blocks);
        lanes.add_set();
        let keeps_uses = !may_move_blocks(policy);
        Self { lanes, policy, pool_blocks: num_blocks - 1, shares: None, keeps_uses, used: 0 }
    }

    /// Tells what is listed from now on apart from what was used before.
    pub(crate) fn begin_use(&mut self) {
        self.used += u64::from(self.keeps_uses);
    }

    /// Whether a listed block was used before the use at hand.
    pub(crate) fn was_used_before(&self, block: BlockId) -> bool {
        self.lanes.used(block).is_some_and(|used| used < self.used)
    }

    /// Blocks that can be evicted.
    pub(crate) fn len(&self) -> usize {
        self.lanes.len(0)
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.lanes.lane(block).is_some()
    }

    /// Where a listed block stands: what has a lower number goes before.
    pub(crate) fn lane(&self, block: BlockId) -> Option<usize> {
        self.lanes.lane(block)
    }

    /// Where a block of this standing would stand.
    pub(crate) fn lane_of(&self, standing: Standing) -> usize {
        let Standing { class, priority, hits, .. } = standing;
        class as usize * CLASS_LANES + usize::from(priority) * MAX_LANES + self.policy.lane(hits)
    }

    /// Lists a block as the one used last.
    pub(crate) fn insert(&mut self, block: BlockId, standing: Standing) {
        self.place(block, self.lane_of(standing), standing.owner, self.used, None);
    }

    /// Has a listed block stand where it should now. What the policy has moved to a lower lane stays there, unless the block
    /// comes down for another reason. `above` is the block that it follows in its sequence: where that one is in its place
    /// already, the block comes before it.
    pub(crate) fn relist(&mut self, block: BlockId, standing: Standing, above: Option<BlockId>) {
        let Some(lane) = self.lanes.lane(block) else { return };
        let own_lane = self.lane_of(standing);
        let group = own_lane / MAX_LANES;
        let owner = self.shares.as_ref().and_then(|shares| shares.lanes.set(block));
        if lane / MAX_LANES == group && owner == standing.owner.map(|owner| owner as usize) {
            return;
        }
        let used = self.lanes.used(block).filter(|_| self.keeps_uses).unwrap_or(self.used);
        let above = above.filter(|&above| self.contains(above));
        let comes_down = group < lane / MAX_LANES;
        // What hangs below it may have come down before the policy has moved it: then that stands in the lane of its hits.
        let lane = if comes_down { own_lane } else { group * MAX_LANES + lane % MAX_LANES };
        let lane = above.and_then(|above| self.lane(above)).map_or(lane, |above| above.min(lane));
        self.remove(block);
        self.place(block, lane, standing.owner, used, above);
    }

    fn place(&mut self, block: BlockId, lane: usize, owner: Option<u32>, used: u64, above: Option<BlockId>) {
        self.lanes.insert_in_order(block, 0, lane, used, above);
        if let (Some(shares), Some(owner)) = (&mut self.shares, owner) {
            shares.lanes.insert_in_order(block, owner as usize, lane, used, above);
            shares.settle(owner);
        }
        while self.is_overfull(lane)
            && let Some(oldest) = self.lanes.oldest(0, lane)
        {
            self.lower(oldest, lane - 1);
        }
    }

    fn is_overfull(&self, lane: usize) -> bool {
        let own = lane % MAX_LANES;
        own > 0 && self.policy.is_overfull(own, self.lanes.lane_len(0, lane), self.pool_blocks)
    }

    /// Moves a lane's oldest block to the young end of a lower lane. What hangs below it stands there already, or lower.
    fn lower(&mut self, block: BlockId, lane: usize) {
        self.lanes.remove(block);
        self.lanes.insert(block, 0, lane, self.used);
        if let Some(shares) = &mut self.shares
            && let Some(owner) = shares.lanes.set(block)
        {
            shares.lanes.remove(block);
            shares.lanes.insert(block, owner, lane, self.used);
        }
    }

    /// Takes a listed block out.
    pub(crate) fn remove(&mut self, block: BlockId) {
        self.lanes.remove(block);
        if let Some(shares) = &mut self.shares {
            shares.remove(block);
        }
    }

    /// Takes all out.
    pub(crate) fn clear(&mut self) {
        self.lanes.clear();
        if let Some(shares) = &mut self.shares {
            shares.lanes.clear();
            shares.over.clear();
            shares.is_over.fill(false);
        }
    }

    /// The block to evict next.
    pub(crate) fn first(&self) -> Option<BlockId> {
        let (block, lane) = self.lanes.first(0)?;
        let own = self.shares.as_ref().and_then(|shares| shares.first());
        Some(own.filter(|&(_, own)| own / CLASS_LANES == lane / CLASS_LANES).map_or(block, |(own, _)| own))
    }

    /// The blocks in the order in which they go, shares aside.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.lanes.iter(0)
    }

    /// Each tenant's blocks in the order in which they go.
    pub(crate) fn iter_shares(&self) -> impl Iterator<Item = impl Iterator<Item = BlockId>> {
        let shares = self.shares.as_ref();
        let num = shares.map_or(0, |shares| shares.limits.len());
        (0..num).map(move |tenant| shares.expect("there are tenants").lanes.iter(tenant))
    }

    /// Sets the idle blocks that a tenant may have before it loses its own first. Tenants are numbered from 0.
    pub(crate) fn set_limit(&mut self, tenant: u32, limit: usize) {
        let num_blocks = self.pool_blocks + 1;
        let shares = self.shares.get_or_insert_with(|| {
            Box::new(Shares {
                lanes: Lanes::new(num_blocks),
                limits: Vec::new(),
                over: Vec::new(),
                is_over: Vec::new(),
            })
        });
        while shares.limits.len() <= tenant as usize {
            shares.lanes.add_set();
            shares.limits.push(usize::MAX);
            shares.is_over.push(false);
        }
        shares.limits[tenant as usize] = limit;
        shares.settle(tenant);
    }

    /// Idle blocks that a tenant alone has used.
    pub(crate) fn owned(&self, tenant: u32) -> usize {
        self.shares.as_ref().map_or(0, |shares| shares.lanes.len(tenant as usize))
    }
}

impl Shares {
    fn remove(&mut self, block: BlockId) {
        if let Some(owner) = self.lanes.set(block) {
            self.lanes.remove(block);
            self.settle(owner as u32);
        }
    }

    /// Looks whether a tenant is above its share.
    fn settle(&mut self, tenant: u32) {
        let is_over = self.lanes.len(tenant as usize) > self.limits[tenant as usize];
        if std::mem::replace(&mut self.is_over[tenant as usize], is_over) == is_over {
            return;
        }
        match self.over.iter().rposition(|&other| other == tenant) {
            Some(place) => drop(self.over.swap_remove(place)),
            None => self.over.push(tenant),
        }
    }

    fn first(&self) -> Option<(BlockId, usize)> {
        self.over.last().and_then(|&tenant| self.lanes.first(tenant as usize))
    }
}
