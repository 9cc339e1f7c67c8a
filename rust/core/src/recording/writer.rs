//! Calls as bytes.

use super::Verb;
use super::chunks::{ChunkWriter, Kind};
use crate::groups::LayerGroup;
use crate::policy::preemption::Costs;
use crate::prefix::{PinId, Retention};
use crate::scheduler::{Proposal, Sampled, SchedulerConfig, Submission};
use crate::units::{RequestId, TokenId};

/// A group as a number: its window, or 0 for one that keeps all positions.
fn window_number(group: LayerGroup) -> u64 {
    match group {
        LayerGroup::Full => 0,
        LayerGroup::Window { tokens } => tokens as u64,
    }
}

#[derive(Debug)]
pub(super) struct Writer {
    chunks: ChunkWriter,
    num_calls: u64,
}

impl Writer {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let mut writer = Self { chunks: ChunkWriter::new(), num_calls: 0 };
        config.numbers().into_iter().for_each(|number| writer.number(number));
        writer.list(config.groups.len(), config.groups.iter().map(|&group| window_number(group)));
        config.reals().into_iter().for_each(|real| writer.real(real));
        writer.chunks.close(Kind::Options);
        writer
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        if self.chunks.len() > 0 {
            self.chunks.close(Kind::Calls);
        }
        self.chunks.take()
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        let mut bytes = self.take();
        self.chunks.bytes().extend(self.num_calls.to_le_bytes());
        self.chunks.close(Kind::End);
        bytes.append(&mut self.chunks.take());
        bytes
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn submit(&mut self, submission: &Submission<'_>, digest: u64) {
        self.verb(Verb::Submit);
        self.list(submission.prompt.len(), submission.prompt.iter().map(|&token| u64::from(token)));
        self.number(submission.max_tokens.map_or(0, |limit| limit as u64 + 1));
        self.number(submission.num_samples as u64);
        self.string(submission.scope);
        self.number(submission.reuse_cached.into());
        self.string(submission.tenant);
        self.number(u64::from(submission.priority as u32));
        self.number(submission.deadline.is_some().into());
        self.real(submission.deadline.unwrap_or(0.0));
        self.retention(&submission.retention);
        self.number(submission.media.len() as u64);
        for medium in submission.media {
            self.number(medium.offset as u64);
            self.string(medium.hash);
        }
        self.digest(digest);
    }

    /// The tenant is the submission's.
    fn retention(&mut self, retention: &Retention<'_>) {
        self.number(retention.session.is_some().into());
        retention.session.iter().for_each(|session| self.string(session));
        for seconds in [retention.ttl, retention.next_turn] {
            self.number(seconds.is_some().into());
            seconds.iter().for_each(|&seconds| self.real(seconds));
        }
        self.number(u64::from(retention.priority as u8));
    }

    pub(super) fn end_session(&mut self, tenant: &[u8], session: &[u8], digest: u64) {
        self.verb(Verb::EndSession);
        self.string(tenant);
        self.string(session);
        self.digest(digest);
    }

    pub(super) fn pin(&mut self, tokens: &[TokenId], scope: &[u8], tenant: &[u8], digest: u64) {
        self.verb(Verb::Pin);
        self.list(tokens.len(), tokens.iter().map(|&token| u64::from(token)));
        self.string(scope);
        self.string(tenant);
        self.digest(digest);
    }

    pub(super) fn unpin(&mut self, pin: PinId, digest: u64) {
        self.verb(Verb::Unpin);
        self.number(pin.get());
        self.digest(digest);
    }

    pub(super) fn set_cache_share(&mut self, tenant: &[u8], share: f64, digest: u64) {
        self.verb(Verb::SetCacheShare);
        self.string(tenant);
        self.real(share);
        self.digest(digest);
    }

    /// A verb whose only argument is a request.
    pub(super) fn of_request(&mut self, verb: Verb, request: RequestId, decided: bool) {
        self.verb(verb);
        self.number(request.get());
        self.digest(u64::from(decided));
    }

    pub(super) fn plan(&mut self, now: f64, digest: u64) {
        self.verb(Verb::Plan);
        self.real(now);
        self.digest(digest);
    }

    pub(super) fn apply(&mut self, plan: u64, sampled: &Sampled<'_>, digest: u64) {
        self.verb(Verb::Apply);
        self.number(plan);
        self.list(sampled.tokens.len(), sampled.tokens.iter().map(|&token| u64::from(token)));
        self.list(sampled.outcomes.len(), sampled.outcomes.iter().map(|&outcome| outcome as u64));
        self.places(sampled.failed_rows);
        self.number(sampled.accepted.is_some().into());
        self.places(sampled.accepted.unwrap_or_default());
        self.digest(digest);
    }

    pub(super) fn propose(&mut self, proposal: &Proposal<'_>, digest: u64) {
        self.verb(Verb::Propose);
        self.places(proposal.rows);
        self.places(proposal.starts);
        self.list(proposal.tokens.len(), proposal.tokens.iter().map(|&token| u64::from(token)));
        self.digest(digest);
    }

    pub(super) fn discard(&mut self, plan: u64, digest: u64) {
        self.verb(Verb::Discard);
        self.number(plan);
        self.digest(digest);
    }

    pub(super) fn plain(&mut self, verb: Verb, digest: u64) {
        self.verb(verb);
        self.digest(digest);
    }

    pub(super) fn set_costs(&mut self, costs: Costs) {
        self.verb(Verb::SetCosts);
        self.real(costs.seconds_per_token);
        self.real(costs.seconds_per_block);
        self.digest(0);
    }

    fn verb(&mut self, verb: Verb) {
        self.num_calls += 1;
        self.chunks.bytes().push(verb as u8);
    }

    fn digest(&mut self, digest: u64) {
        self.chunks.bytes().extend(digest.to_le_bytes());
    }

    fn real(&mut self, value: f64) {
        self.chunks.bytes().extend(value.to_le_bytes());
    }

    fn string(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.chunks.bytes().extend(bytes);
    }

    fn list(&mut self, len: usize, values: impl Iterator<Item = u64>) {
        self.number(len as u64);
        values.for_each(|value| self.number(value));
    }

    fn places(&mut self, places: &[usize]) {
        self.list(places.len(), places.iter().map(|&place| place as u64));
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.chunks.bytes().push(value as u8 | 0x80);
            value >>= 7;
        }
        self.chunks.bytes().push(value as u8);
    }
}
