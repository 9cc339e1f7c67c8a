//! Fair shares: whose request is tried next, and what is counted for it.

use std::ops::Bound;

use smallvec::SmallVec;

use super::Scheduler;
use super::sequence::{SeqIndex, SeqKey, Sequence};
use crate::error::{Error, Result};
use crate::policy::fair::{Turn, tenant_of, unstarted_rank};
use crate::units::RequestId;

/// A tenant's request that never started.
fn unstarted(tenant: u32, request: RequestId) -> SeqKey {
    SeqKey { rank: unstarted_rank(tenant), request, child: 0 }
}

impl Scheduler {
    /// The first of those that wait.
    pub(super) fn first_waiting(&self) -> Option<(SeqKey, SeqIndex)> {
        let (&key, &index) = self.waiting.first_key_value()?;
        if tenant_of(key.rank).is_none() {
            return Some((key, index));
        }
        let turn = self.shares.turns().next()?;
        self.waiting.get_key_value(&unstarted(turn.tenant, turn.head)).map(|(&key, &index)| (key, index))
    }

    /// The first of those that wait, in order: who was preempted, then who is next as each tenant's requests are counted.
    pub(super) fn fair_order(&self, most: usize, mut list: impl FnMut(SeqIndex)) {
        let mut left = most;
        let started = ..unstarted(0, RequestId::new(0));
        for &index in self.waiting.range(started).map(|(_, index)| index).take(most) {
            list(index);
            left -= 1;
        }
        let mut turns: SmallVec<[Turn; 32]> = self.shares.turns().take(left).collect();
        while left > 0
            && let Some(next) = turns.iter_mut().min()
        {
            let key = unstarted(next.tenant, next.head);
            let index = self.waiting[&key];
            list(index);
            left -= 1;
            next.count += self.tokens_to_count(&self.sequences[index], next.tenant) as u64;
            match self.next_unstarted(next.tenant, Bound::Excluded(key)) {
                Some(head) => next.head = head,
                None => {
                    let tenant = next.tenant;
                    turns.retain(|turn| turn.tenant != tenant);
                }
            }
        }
    }

    /// Notes that a sequence waits, or does not wait any more.
    pub(super) fn update_turn(&mut self, key: SeqKey) {
        if let Some(tenant) = tenant_of(key.rank) {
            let head = self.next_unstarted(tenant, Bound::Included(unstarted(tenant, RequestId::new(0))));
            self.shares.set_head(tenant, head);
        }
    }

    /// Counts the tokens of a request that starts for the first time, and gives it its rank among those that run.
    pub(super) fn charge_start(&mut self, index: SeqIndex) -> SeqKey {
        let key = self.sequences[index].key;
        let Some(tenant) = tenant_of(key.rank) else { return key };
        let expected = self.expected_output(&self.sequences[index], tenant);
        let rank = self.shares.start(tenant, self.tokens_to_count(&self.sequences[index], tenant));
        let sequence = &mut self.sequences[index];
        sequence.key.rank = rank;
        (sequence.counted_prompt, sequence.counted_output) = (sequence.prompt_len, expected);
        if let Some(request) = self.requests.get_mut(&key.request) {
            request.rank = rank;
        }
        self.sequences[index].key
    }

    /// Takes back what was counted for the part of a prompt that was found in the cache.
    pub(super) fn settle_hit(&mut self, index: SeqIndex, cached: usize) {
        let sequence = &mut self.sequences[index];
        if let Some(tenant) = self.requests.get(&sequence.key.request).and_then(|request| request.tenant) {
            sequence.counted_prompt -= cached;
            self.shares.settle(tenant, cached, 0);
        }
    }

    /// Replaces what was counted for a sequence that has ended, however it did, by what was computed for it.
    pub(super) fn settle_shares(&mut self, tenant: u32, ended: &Sequence) {
        let counted = ended.counted_prompt + ended.counted_output * ended.num_samples;
        self.shares.settle(tenant, counted, ended.spent_tokens);
    }

    fn tokens_to_count(&self, sequence: &Sequence, tenant: u32) -> usize {
        sequence.prompt_len + self.expected_output(sequence, tenant) * sequence.num_samples
    }

    fn expected_output(&self, sequence: &Sequence, tenant: u32) -> usize {
        self.shares.expected(tenant, sequence.max_tokens, sequence.max_len - sequence.prompt_len)
    }

    /// The oldest of a tenant's waiting requests that never started, from a place of the queue on.
    fn next_unstarted(&self, tenant: u32, from: Bound<SeqKey>) -> Option<RequestId> {
        let last = SeqKey { child: u32::MAX, ..unstarted(tenant, RequestId::new(u64::MAX)) };
        self.waiting.range((from, Bound::Included(last))).next().map(|(key, _)| key.request)
    }

    /// Whether exactly the tenants whose requests wait have a turn, each with its oldest.
    pub(super) fn check_turns(&self) -> Result<()> {
        let mut num_turns = 0;
        let mut last = None;
        for key in self.waiting.keys() {
            let tenant = tenant_of(key.rank);
            if tenant.is_some() && tenant != last {
                num_turns += 1;
                last = tenant;
                if tenant.and_then(|tenant| self.shares.turn(tenant)).map(|turn| turn.head)
                    != Some(key.request)
                {
                    let detail =
                        format!("request {} is the first of its tenant and is not", key.request.get());
                    return Err(Error::broken("I8 lists", detail));
                }
            }
        }
        match self.shares.turns().count() {
            counted if counted == num_turns => Ok(()),
            counted => {
                Err(Error::broken("I8 lists", format!("{num_turns} tenants wait, {counted} have a turn")))
            }
        }
    }
}
