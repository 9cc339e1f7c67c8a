//! A run as bytes: every call of a scheduler's verbs with its arguments, and a digest of what it decided.
//!
//! The scheduler has no clock, no randomness and calls nobody, so the same calls give the same decisions: a recording that
//! is replayed either agrees call by call, or names the first call that does not.
//!
//! ```text
//! recording = magic, chunk*                             the chunks: options, calls*, end
//! chunk     = kind, length, bytes, checksum             its bytes: the options, or call*, or the number of calls
//! call      = verb, arguments, digest of the decision
//! ```
//! Whole numbers are variable-length (7 bits a byte, the lowest first); times, costs, a chunk's length and its checksum are 8
//! bytes, little-endian. So what was changed anywhere is found before a call is made, and what a process left that died is
//! known by the lacking end.

mod chunks;
mod error;
mod reader;
mod writer;

use xxhash_rust::xxh3::Xxh3;

pub use error::{Ending, ReplayError};
pub use reader::{RecordedRequest, Replayed, recorded_requests, replay};
use writer::Writer;

use crate::error::{Error, Result};
use crate::policy::preemption::Costs;
use crate::prefix::{PinId, Pinned};
use crate::scheduler::{
    FinishReason, Plan, Proposal, RequestSummary, Sampled, Scheduler, SchedulerConfig, StepArrays,
    Submission, TableSync,
};
use crate::units::{RequestId, TokenId};

/// What every recording begins with, of whichever format.
const NAME: &[u8] = b"pykv-recording-";

/// The format that is written and read.
const FORMAT: u8 = b'7';

/// The calls that are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Verb {
    Submit = 1,
    Abort,
    Plan,
    Apply,
    Discard,
    TakeEnded,
    ResetPrefixCache,
    SetCosts,
    Propose,
    EndSession,
    Pin,
    Unpin,
    SetCacheShare,
    Pause,
    Resume,
}

impl Verb {
    fn from_number(number: u8) -> Option<Self> {
        use Verb::{
            Abort, Apply, Discard, EndSession, Pause, Pin, Plan, Propose, ResetPrefixCache, Resume,
            SetCacheShare, SetCosts, Submit, TakeEnded, Unpin,
        };
        let all = [
            Submit,
            Abort,
            Plan,
            Apply,
            Discard,
            TakeEnded,
            ResetPrefixCache,
            SetCosts,
            Propose,
            EndSession,
            Pin,
            Unpin,
            SetCacheShare,
            Pause,
            Resume,
        ];
        all.into_iter().find(|verb| *verb as u8 == number)
    }
}

/// A scheduler whose calls are recorded, if asked for.
#[derive(Debug)]
pub struct RecordedScheduler {
    scheduler: Scheduler,
    recording: Option<Writer>,
    calls: u64,
}

impl RecordedScheduler {
    /// A scheduler with an empty pool that is not recorded yet.
    ///
    /// # Errors
    /// Those of [`Scheduler::new`].
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        Ok(Self { scheduler: Scheduler::new(config)?, recording: None, calls: 0 })
    }

    /// The scheduler, to look at.
    pub fn scheduler(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Starts a recording, which must see every call. Returns whether it did: not after the first call, nor while there is
    /// a recording.
    pub fn start_recording(&mut self) -> bool {
        let fresh = self.calls == 0 && self.recording.is_none();
        if fresh {
            self.recording = Some(Writer::new(self.scheduler.config()));
        }
        fresh
    }

    /// The bytes that were recorded since the last call of this: whole chunks.
    pub fn take_recording(&mut self) -> Vec<u8> {
        self.recording.as_mut().map(Writer::take).unwrap_or_default()
    }

    /// Ends the recording. Returns the bytes that were not taken yet, its end included.
    pub fn finish_recording(&mut self) -> Vec<u8> {
        self.recording.take().map(Writer::finish).unwrap_or_default()
    }

    /// Bytes that wait to be taken.
    pub fn recording_len(&self) -> usize {
        self.recording.as_ref().map_or(0, Writer::len)
    }

    /// Gives the recording up. What was not taken is lost, and what was has no end.
    pub fn stop_recording(&mut self) {
        self.recording = None;
    }

    /// See [`Scheduler::submit`].
    ///
    /// # Errors
    /// As there.
    pub fn submit(&mut self, submission: Submission<'_>) -> Result<RequestId> {
        let result = self.scheduler.submit(submission);
        self.record(|writer| writer.submit(&submission, digest_of(&result)));
        result
    }

    /// See [`Scheduler::abort`].
    pub fn abort(&mut self, request: RequestId) -> bool {
        let lived = self.scheduler.abort(request);
        self.record(|writer| writer.of_request(Verb::Abort, request, lived));
        lived
    }

    /// See [`Scheduler::pause`].
    pub fn pause(&mut self, request: RequestId) -> bool {
        let lived = self.scheduler.pause(request);
        self.record(|writer| writer.of_request(Verb::Pause, request, lived));
        lived
    }

    /// See [`Scheduler::resume`].
    pub fn resume(&mut self, request: RequestId) -> bool {
        let was_paused = self.scheduler.resume(request);
        self.record(|writer| writer.of_request(Verb::Resume, request, was_paused));
        was_paused
    }

    /// See [`Scheduler::plan`].
    ///
    /// # Errors
    /// As there.
    pub fn plan(&mut self, arrays: &StepArrays<'_>, sync: &mut TableSync, now: f64) -> Result<Option<Plan>> {
        let result = self.scheduler.plan(arrays, sync, now);
        if matches!(result, Err(Error::ArraysInFlight { .. })) {
            // It has changed nothing, and a replay has arrays of its own.
            return result;
        }
        if self.recording.is_some() {
            let digest = plan_digest(&result, arrays, self.scheduler.config());
            self.record(|writer| writer.plan(now, digest));
        } else {
            self.calls += 1;
        }
        result
    }

    /// See [`Scheduler::propose`].
    ///
    /// # Errors
    /// As there.
    pub fn propose(&mut self, proposal: Proposal<'_>) -> Result<()> {
        let result = self.scheduler.propose(proposal);
        self.record(|writer| writer.propose(&proposal, digest_of(&result)));
        result
    }

    /// See [`Scheduler::apply`].
    ///
    /// # Errors
    /// As there.
    pub fn apply(
        &mut self,
        plan: u64,
        sampled: Sampled<'_>,
        mut finished: impl FnMut(usize, FinishReason),
    ) -> Result<Vec<RequestSummary>> {
        let Some(writer) = &mut self.recording else {
            self.calls += 1;
            return self.scheduler.apply(plan, sampled, finished);
        };
        let mut reasons = Xxh3::new();
        let result = self.scheduler.apply(plan, sampled, |sample, reason| {
            reasons.update(&[reason as u8]);
            finished(sample, reason);
        });
        writer.apply(plan, &sampled, reasons.digest() ^ digest_of(&result));
        result
    }

    /// See [`Scheduler::discard`].
    ///
    /// # Errors
    /// As there.
    pub fn discard(&mut self, plan: u64) -> Result<()> {
        let result = self.scheduler.discard(plan);
        self.record(|writer| writer.discard(plan, digest_of(&result)));
        result
    }

    /// See [`Scheduler::take_ended`].
    pub fn take_ended(&mut self) -> Vec<RequestSummary> {
        let ended = self.scheduler.take_ended();
        self.record(|writer| writer.plain(Verb::TakeEnded, digest_of(&ended)));
        ended
    }

    /// See [`Scheduler::reset_prefix_cache`].
    pub fn reset_prefix_cache(&mut self) {
        self.scheduler.reset_prefix_cache();
        self.record(|writer| writer.plain(Verb::ResetPrefixCache, 0));
    }

    /// See [`Scheduler::set_costs`].
    ///
    /// # Errors
    /// Those of [`Scheduler::set_costs`].
    pub fn set_costs(&mut self, costs: Costs) -> Result<()> {
        self.scheduler.set_costs(costs)?;
        self.record(|writer| writer.set_costs(costs));
        Ok(())
    }

    /// See [`Scheduler::end_session`].
    pub fn end_session(&mut self, tenant: &[u8], session: &[u8]) -> bool {
        let was_live = self.scheduler.end_session(tenant, session);
        self.record(|writer| writer.end_session(tenant, session, u64::from(was_live)));
        was_live
    }

    /// See [`Scheduler::pin`].
    ///
    /// # Errors
    /// As there.
    pub fn pin(&mut self, tokens: &[TokenId], scope: &[u8], tenant: &[u8]) -> Result<Option<Pinned>> {
        let result = self.scheduler.pin(tokens, scope, tenant);
        self.record(|writer| writer.pin(tokens, scope, tenant, digest_of(&result)));
        result
    }

    /// See [`Scheduler::unpin`].
    pub fn unpin(&mut self, pin: PinId) -> bool {
        let was_there = self.scheduler.unpin(pin);
        self.record(|writer| writer.unpin(pin, u64::from(was_there)));
        was_there
    }

    /// See [`Scheduler::set_cache_share`].
    ///
    /// # Errors
    /// As there.
    pub fn set_cache_share(&mut self, tenant: &[u8], share: f64) -> Result<()> {
        let result = self.scheduler.set_cache_share(tenant, share);
        self.record(|writer| writer.set_cache_share(tenant, share, digest_of(&result)));
        result
    }

    fn record(&mut self, write: impl FnOnce(&mut Writer)) {
        self.calls += 1;
        if let Some(writer) = &mut self.recording {
            write(writer);
        }
    }
}

/// A decision's digest: of all that its debug form says, which names every field.
fn digest_of(decision: &impl std::fmt::Debug) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(format!("{decision:?}").as_bytes());
    hasher.digest()
}

/// The digest of a plan and of the parts of the arrays that it filled.
fn plan_digest(result: &Result<Option<Plan>>, arrays: &StepArrays<'_>, config: &SchedulerConfig) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(format!("{result:?}").as_bytes());
    if let Ok(Some(plan)) = result {
        arrays.visit_filled(plan, config, |value| hasher.update(&value.to_le_bytes()));
    }
    hasher.digest()
}

#[cfg(all(test, not(loom)))]
mod tests;
