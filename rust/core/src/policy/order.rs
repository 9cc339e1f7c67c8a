//! Who comes first.

use hashbrown::HashMap;

use crate::error::{Error, Result};

/// The order in which waiting requests start; within one rank the older request comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOrder {
    /// As they came.
    Fcfs,
    /// By the priority that the caller gave, the lowest number first.
    Priority,
    /// Whoever finds most of its prompt in the cache, with a bound on how often a request is passed.
    LongestPrefix,
    /// Fair shares of tokens between tenants, whoever sends how much.
    FairShare,
}

impl QueueOrder {
    /// All orders, each at its own number.
    pub(crate) const ALL: [Self; 4] = [Self::Fcfs, Self::Priority, Self::LongestPrefix, Self::FairShare];

    /// The order with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "fcfs" => Ok(Self::Fcfs),
            "priority" => Ok(Self::Priority),
            "longest_prefix" => Ok(Self::LongestPrefix),
            "fair_share" => Ok(Self::FairShare),
            _ => Err(Error::config("queue_order", name, "fcfs, priority, longest_prefix or fair_share")),
        }
    }
}

/// A priority as a rank: the lowest number first.
pub fn priority_rank(priority: i32) -> u64 {
    (i64::from(priority) - i64::from(i32::MIN)) as u64
}

/// Virtual time, in tokens: each tenant's requests start one after the other in it, all tenants side by side.
///
/// A tenant that was idle joins at the present, so that it can save nothing up and owes nothing.
///
/// Source: P. Goyal, H. Vin, H. Cheng, *Start-time Fair Queuing*, SIGCOMM 1996.
#[derive(Debug, Default)]
pub struct VirtualTime {
    now: u64,
    ends: HashMap<Box<[u8]>, u64>,
}

impl VirtualTime {
    /// When a tenant's next request of so many tokens starts.
    pub fn start(&mut self, tenant: &[u8], num_tokens: usize) -> u64 {
        let start = self.ends.get(tenant).copied().unwrap_or(0).max(self.now);
        self.ends.insert(tenant.into(), start.saturating_add(num_tokens as u64));
        if self.ends.len() > MAX_TENANTS {
            self.forget_half();
        }
        start
    }

    /// Nobody waits or runs: nobody owes anything.
    pub fn rest(&mut self) {
        self.now = self.ends.values().copied().max().unwrap_or(0).max(self.now);
        self.ends.clear();
    }

    /// Time goes on to the start of a request that runs now. Tenants whose requests all lie behind are forgotten.
    pub fn advance(&mut self, start: u64) {
        if start > self.now {
            self.now = start;
            self.ends.retain(|_, end| *end > start);
        }
    }
}

/// Tenants that are remembered.
const MAX_TENANTS: usize = 4096;

impl VirtualTime {
    /// Time goes on until half of the tenants lie behind: those that owe the least.
    fn forget_half(&mut self) {
        let mut ends: Vec<u64> = self.ends.values().copied().collect();
        let middle = ends.len() / 2;
        let (_, &mut end, _) = ends.select_nth_unstable(middle);
        self.advance(end);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn tenants_that_come_once_are_forgotten() {
        let mut time = VirtualTime::default();
        for tenant in 0..20_000u32 {
            time.start(&tenant.to_le_bytes(), 10);
        }
        assert!(time.ends.len() <= MAX_TENANTS);
        time.rest();
        assert!(time.ends.is_empty());
    }

    #[test]
    fn a_lower_number_ranks_first() {
        assert!(priority_rank(-1) < priority_rank(0));
        assert!(priority_rank(i32::MIN) < priority_rank(i32::MAX));
    }

    #[test]
    fn a_tenant_that_sends_more_waits_behind_its_own() {
        let mut time = VirtualTime::default();
        let greedy: Vec<_> = (0..3).map(|_| time.start(b"greedy", 100)).collect();
        assert_eq!(greedy, [0, 100, 200]);
        assert_eq!(time.start(b"modest", 100), 0);
    }

    #[test]
    fn an_idle_tenant_saves_nothing_up() {
        let mut time = VirtualTime::default();
        time.start(b"early", 10);
        time.advance(500);
        assert_eq!(time.start(b"early", 10), 500);
        assert_eq!(time.ends.len(), 1);
    }
}
