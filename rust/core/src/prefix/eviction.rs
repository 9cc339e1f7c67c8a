//! Eviction policies: which idle blocks make room first, among those that nothing else tells apart.
//!
//! A policy sorts idle blocks into lanes by how often hits have found them; what waits in a lower lane goes first, and
//! within a lane what was used least recently. A hit finds a run of blocks from the first on, so a block was found at
//! least as often as those that follow it. A policy that gives no lower lane for more hits therefore never lets a block
//! go before one that hangs below it: whatever the policy, eviction takes leaves. `docs/new-policy.md` shows how to add
//! one.

mod lru;
mod segmented_lru;

use std::fmt::Debug;

pub use lru::Lru;
pub use segmented_lru::SegmentedLru;

use crate::error::{Error, Result};

/// The lanes that a policy may use.
pub const MAX_LANES: usize = 4;

/// Sorts idle blocks into lanes.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// The name by which it is chosen.
    fn name(&self) -> &'static str;

    /// The lane, below [`MAX_LANES`], of a block that hits have found so often since it was computed (255: or more often).
    /// No hit gives lane 0, and more hits never give a lower lane.
    fn lane(&self, hits: u8) -> usize;

    /// Whether the oldest block of a lane above 0 moves to the young end of the lane below, given the lane's blocks and
    /// those of the pool. Never asked of lane 0.
    fn is_overfull(&self, _lane: usize, _lane_blocks: usize, _pool_blocks: usize) -> bool {
        false
    }
}

/// All policies. A new one is listed here.
pub const POLICIES: [&dyn EvictionPolicy; 2] = [&Lru, &SegmentedLru];

/// The policy with this name.
///
/// # Errors
/// [`Error::InvalidConfig`] for an unknown name.
pub fn eviction_policy(name: &str) -> Result<&'static dyn EvictionPolicy> {
    let known = POLICIES.into_iter().find(|policy| policy.name() == name);
    known.ok_or_else(|| {
        Error::config("eviction", format!("'{name}'"), POLICIES.map(EvictionPolicy::name).join(" or "))
    })
}

/// Whether a policy may move blocks, so that the order in its lanes is not that of last uses: it has lanes above 0.
pub(super) fn may_move_blocks(policy: &dyn EvictionPolicy) -> bool {
    policy.lane(u8::MAX) > 0
}

/// Whether lanes begin with 0 and more hits never give a lower one: what keeps leaves first.
///
/// # Errors
/// [`Error::InvalidConfig`] with the lanes that a policy must not give.
pub fn check_policy(policy: &dyn EvictionPolicy) -> Result<()> {
    let lanes: Vec<usize> = (0..=u8::MAX).map(|hits| policy.lane(hits)).collect();
    if lanes[0] == 0 && lanes.is_sorted() && lanes.iter().all(|&lane| lane < MAX_LANES) {
        return Ok(());
    }
    let allowed =
        format!("a policy whose lanes begin with 0, are below {MAX_LANES} and do not fall with more hits");
    Err(Error::config("eviction", policy.name(), allowed))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_policy_keeps_leaves_first_and_is_found_by_its_name() {
        for policy in POLICIES {
            check_policy(policy).unwrap();
            assert_eq!(eviction_policy(policy.name()).unwrap().name(), policy.name());
        }
        let error = eviction_policy("fifo").unwrap_err().to_string();
        assert_eq!(error, "eviction is 'fifo': allowed is lru or segmented_lru");
    }

    #[derive(Debug)]
    struct Wrong(fn(u8) -> usize);

    impl EvictionPolicy for Wrong {
        fn name(&self) -> &'static str {
            "wrong"
        }

        fn lane(&self, hits: u8) -> usize {
            self.0(hits)
        }
    }

    #[test]
    fn a_policy_whose_lanes_fall_or_begin_above_0_or_are_too_many_is_refused() {
        let falling = Wrong(|hits| usize::from(hits == 3));
        for policy in [falling, Wrong(|_| 1), Wrong(|hits| usize::from(hits / 50))] {
            assert!(check_policy(&policy).unwrap_err().to_string().starts_with("eviction is wrong"));
        }
    }

    #[test]
    fn only_a_policy_with_lanes_above_0_may_move_blocks() {
        assert_eq!(POLICIES.map(may_move_blocks), [false, true]);
        assert!(may_move_blocks(&Wrong(|hits| usize::from(hits == 255))));
    }
}
