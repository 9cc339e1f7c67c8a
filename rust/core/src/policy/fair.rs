//! Fair shares: a count of tokens for each tenant, and whose request is next.
//!
//! The tenant with the lowest count is next. When a request starts, what is to be computed of its prompt and its expected
//! outputs are counted; when a sample ends, that is replaced by what was computed. So counts follow the tokens that were
//! really computed, whatever limits and estimates said, and also for requests that wait behind each other.
//!
//! A tenant that begins to wait is lifted to the lowest count of those that wait: who was idle has saved nothing up.
//!
//! Source: Y. Sheng et al., *Fairness in Serving Large Language Models*, OSDI 2024.

use std::collections::BTreeSet;

use hashbrown::HashMap;

use super::length::OutputEstimate;
use crate::units::RequestId;

/// Ranks from here on are those of requests that never started, one for each tenant.
const UNSTARTED: u64 = 1 << 63;

/// The rank of a tenant's requests that never started. It comes after those of all that did.
pub fn unstarted_rank(tenant: u32) -> u64 {
    UNSTARTED + u64::from(tenant)
}

/// The tenant whose requests that never started have this rank.
pub fn tenant_of(rank: u64) -> Option<u32> {
    rank.checked_sub(UNSTARTED).map(|tenant| tenant as u32)
}

/// Where a tenant with waiting requests stands: who has the lowest is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// Tokens that were counted for the tenant.
    pub count: u64,
    /// The oldest of its requests that wait and never started.
    pub head: RequestId,
    /// The tenant.
    pub tenant: u32,
}

#[derive(Debug, Default)]
struct Tenant {
    name: Box<[u8]>,
    count: u64,
    outputs: OutputEstimate,
    num_requests: usize,
    head: Option<RequestId>,
}

/// The counts of all tenants that have a request, and of some that had one.
#[derive(Debug, Default)]
pub struct FairShares {
    numbers: HashMap<Box<[u8]>, u32>,
    tenants: Vec<Tenant>,
    vacant: Vec<u32>,
    turns: BTreeSet<Turn>,
    num_idle: usize,
    /// The count that a tenant is lifted to if nobody else waits.
    level: u64,
    /// The highest count so far.
    highest: u64,
    /// The latest virtual start so far.
    latest: u64,
}

/// Tenants without a request that are remembered.
const MAX_IDLE: usize = 4096;

impl FairShares {
    /// A tenant has one more request. `outputs` is what is expected of a tenant that is not known yet.
    pub fn enter(&mut self, name: &[u8], outputs: OutputEstimate) -> u32 {
        if let Some(&number) = self.numbers.get(name) {
            let tenant = &mut self.tenants[number as usize];
            self.num_idle -= usize::from(tenant.num_requests == 0);
            tenant.num_requests += 1;
            return number;
        }
        let number = self.vacant.pop().unwrap_or(self.tenants.len() as u32);
        let tenant = Tenant { name: name.into(), outputs, num_requests: 1, ..Tenant::default() };
        match self.tenants.get_mut(number as usize) {
            Some(place) => *place = tenant,
            None => self.tenants.push(tenant),
        }
        self.numbers.insert(name.into(), number);
        number
    }

    /// One of a tenant's requests has ended.
    pub fn leave(&mut self, tenant: u32) {
        let entry = &mut self.tenants[tenant as usize];
        entry.num_requests -= 1;
        self.num_idle += usize::from(entry.num_requests == 0);
        if self.num_idle > MAX_IDLE {
            self.forget_half();
        }
    }

    /// Nobody waits or runs: nobody owes anything.
    pub fn rest(&mut self) {
        self.level = self.highest;
    }

    /// Says which of a tenant's requests that never started is the oldest that waits.
    pub fn set_head(&mut self, tenant: u32, head: Option<RequestId>) {
        let before = self.turn(tenant);
        if before.is_none() && head.is_some() {
            let lowest = self.turns.first().map_or(self.level, |turn| turn.count);
            self.tenants[tenant as usize].count = self.tenants[tenant as usize].count.max(lowest);
        }
        self.tenants[tenant as usize].head = head;
        self.place(tenant, before);
    }

    /// Who is next, and those after it.
    pub fn turns(&self) -> impl Iterator<Item = Turn> {
        self.turns.iter().copied()
    }

    /// A tenant's place among those that wait.
    pub fn turn(&self, tenant: u32) -> Option<Turn> {
        let Tenant { count, head, .. } = self.tenants[tenant as usize];
        head.map(|head| Turn { count, head, tenant })
    }

    /// Tokens that an output of a tenant is expected to have.
    pub fn expected(&self, tenant: u32, limit: Option<usize>, room: usize) -> usize {
        self.tenants[tenant as usize].outputs.expected(limit, room)
    }

    /// One more output of a tenant has ended: `learn` gives the estimate after it.
    pub fn learn(&mut self, tenant: u32, learn: impl FnOnce(OutputEstimate) -> OutputEstimate) {
        let outputs = &mut self.tenants[tenant as usize].outputs;
        *outputs = learn(*outputs);
    }

    /// Counts the tokens of a request that starts. Returns its rank among those that have started: its virtual start, which
    /// is never before that of one that started earlier.
    pub fn start(&mut self, tenant: u32, num_tokens: usize) -> u64 {
        self.level = self.tenants[tenant as usize].count;
        self.latest = self.latest.max(self.level);
        self.settle(tenant, 0, num_tokens);
        self.latest
    }

    /// Replaces tokens that were counted by those that were computed.
    pub fn settle(&mut self, tenant: u32, counted: usize, num_tokens: usize) {
        let before = self.turn(tenant);
        let entry = &mut self.tenants[tenant as usize];
        entry.count = (entry.count + num_tokens as u64).saturating_sub(counted as u64);
        self.highest = self.highest.max(entry.count);
        self.place(tenant, before);
    }

    fn place(&mut self, tenant: u32, before: Option<Turn>) {
        let now = self.turn(tenant);
        if now != before {
            if let Some(before) = before {
                self.turns.remove(&before);
            }
            self.turns.extend(now);
        }
    }

    /// Forgets the half of the tenants without a request that owes the least.
    fn forget_half(&mut self) {
        let idle = |(_, tenant): &(usize, &Tenant)| tenant.num_requests == 0 && !tenant.name.is_empty();
        let mut all: Vec<(u64, usize)> = self
            .tenants
            .iter()
            .enumerate()
            .filter(idle)
            .map(|(number, tenant)| (tenant.count, number))
            .collect();
        let half = all.len() / 2;
        all.select_nth_unstable(half);
        for &(_, number) in &all[..half] {
            let name = std::mem::take(&mut self.tenants[number].name);
            self.numbers.remove(&name);
            self.vacant.push(number as u32);
        }
        self.num_idle -= half;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn known() -> OutputEstimate {
        OutputEstimate::default()
    }

    #[test]
    fn tenants_that_come_once_are_forgotten() {
        let mut shares = FairShares::default();
        for name in 0..20_000_u32 {
            let tenant = shares.enter(&name.to_le_bytes(), known());
            shares.set_head(tenant, Some(RequestId::new(u64::from(name))));
            shares.set_head(tenant, None);
            shares.start(tenant, 10);
            shares.leave(tenant);
        }
        assert!(shares.numbers.len() <= MAX_IDLE && shares.tenants.len() <= MAX_IDLE + 1);
        assert_eq!(shares.numbers.len() + shares.vacant.len(), shares.tenants.len());
    }

    #[test]
    fn who_was_idle_has_saved_nothing_up_and_owes_nothing_once_all_rest() {
        let mut shares = FairShares::default();
        let (busy, idle) = (shares.enter(b"busy", known()), shares.enter(b"idle", known()));
        shares.set_head(busy, Some(RequestId::new(0)));
        (0..50).for_each(|_| {
            shares.start(busy, 100);
        });
        shares.set_head(idle, Some(RequestId::new(1)));
        assert_eq!(shares.turn(idle).unwrap().count, 5000);
        shares.set_head(busy, None);
        shares.set_head(idle, None);
        shares.rest();
        for (tenant, request) in [(busy, 2), (idle, 3)] {
            shares.set_head(tenant, Some(RequestId::new(request)));
        }
        assert_eq!(shares.turn(busy).unwrap().count, shares.turn(idle).unwrap().count);
    }

    #[test]
    fn what_was_counted_too_much_is_given_back_to_those_that_wait() {
        let mut shares = FairShares::default();
        let (modest, other) = (shares.enter(b"modest", known()), shares.enter(b"other", known()));
        shares.set_head(modest, Some(RequestId::new(0)));
        shares.set_head(other, Some(RequestId::new(1)));
        assert_eq!((shares.start(modest, 110), shares.start(other, 50)), (0, 0));
        assert_eq!(shares.turns().next().unwrap().tenant, other);
        shares.settle(modest, 100, 5);
        assert_eq!(
            shares.turns().next().unwrap(),
            Turn { count: 15, head: RequestId::new(0), tenant: modest }
        );
    }
}
