//! Bytes as calls, made again on a new scheduler.

use super::chunks::{Chunk, Kind, chunks_of, number_from};
use super::error::{Ending, ReplayError};
use super::{RecordedScheduler, Verb, digest_of, plan_digest};
use crate::error::Error;
use crate::groups::LayerGroup;
use crate::policy::preemption::Costs;
use crate::prefix::{Media, PinId, Retention};
use crate::scheduler::{
    FinishReason, Outcome, OwnedArrays, Proposal, RequestSummary, Sampled, SchedulerConfig, Submission,
    TableSync,
};
use crate::units::{RequestId, TokenId};

/// Memory that a replay may take: far more than any real scheduler's, and less than would take a machine down.
const MAX_REPLAY_BYTES: u128 = 4 << 30;

/// A recording that was replayed and agreed in every call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Calls that were made again.
    pub num_calls: u64,
    /// Those of them that planned a step.
    pub num_plans: u64,
    /// Whether the recording has no end: more calls may have been made.
    pub is_cut: bool,
}

/// A request that was submitted while a scheduler was recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedRequest {
    /// The time of the next plan, in seconds.
    pub arrival: f64,
    /// The prompt's tokens.
    pub prompt: Vec<TokenId>,
    /// What it could share within.
    pub scope: Vec<u8>,
    /// Who paid for it.
    pub tenant: Vec<u8>,
    /// Tokens that were sampled before it ended, or before the recording did.
    pub output_tokens: usize,
}

/// Makes the calls of a recording again and compares every decision.
///
/// # Errors
/// [`ReplayError`] with the first place that does not fit.
pub fn replay(bytes: &[u8], ending: Ending) -> Result<Replayed, ReplayError> {
    run(bytes, ending).map(|(_, done, _)| done)
}

/// The requests of a recording, by the order in which they were submitted, and its tokens a block. Refused ones and
/// those that no plan came after are left out. The calls are made again, since a recording does not keep what ended.
///
/// # Errors
/// Those of [`replay`].
pub fn recorded_requests(bytes: &[u8]) -> Result<(usize, Vec<RecordedRequest>), ReplayError> {
    run(bytes, Ending::Complete).map(|(block_size, _, mut requests)| {
        requests.retain(|request| !request.arrival.is_nan());
        (block_size, requests)
    })
}

fn run(bytes: &[u8], ending: Ending) -> Result<(usize, Replayed, Vec<RecordedRequest>), ReplayError> {
    let (chunks, is_cut) = chunks_of(bytes, ending)?;
    let config = Reader::new(&chunks[0]).config()?;
    config.validate().map_err(ReplayError::Options)?;
    let (needed, limit) = (config.num_bytes(), MAX_REPLAY_BYTES);
    if needed > limit {
        return Err(ReplayError::TooLarge { bytes: needed, limit });
    }
    let scheduler = RecordedScheduler::new(config.clone()).map_err(ReplayError::Options)?;
    let mut replay = Replay {
        buffers: (0..config.max_steps_in_flight)
            .map(|_| (OwnedArrays::new(&config), TableSync::default()))
            .collect(),
        scheduler,
        requests: Vec::new(),
        num_planned: 0,
    };
    let mut done = Replayed { is_cut, ..Replayed::default() };
    for chunk in chunks.iter().filter(|chunk| chunk.kind == Kind::Calls) {
        let mut reader = Reader::new(chunk);
        while reader.offset < chunk.bytes.len() {
            let verb = reader.verb()?;
            let decided = replay.call(&mut reader, verb)?;
            if reader.digest()? != decided {
                return Err(ReplayError::Diverged { call: done.num_calls, verb: format!("{verb:?}") });
            }
            done.num_calls += 1;
            done.num_plans += u64::from(verb == Verb::Plan);
        }
    }
    if let Some(end) = chunks.last().filter(|chunk| chunk.kind == Kind::End)
        && number_from(end.bytes) != done.num_calls
    {
        let problem = "the end mark tells of another number of calls";
        return Err(ReplayError::Malformed { offset: end.offset, problem });
    }
    Ok((config.block_size, done, replay.requests))
}

struct Replay {
    scheduler: RecordedScheduler,
    /// One for each step that may be in flight.
    buffers: Vec<(OwnedArrays, TableSync)>,
    /// By their number.
    requests: Vec<RecordedRequest>,
    /// Those of them that a plan has seen.
    num_planned: usize,
}

impl Replay {
    /// Makes one call; returns the digest of what it decided.
    fn call(&mut self, reader: &mut Reader<'_>, verb: Verb) -> Result<u64, ReplayError> {
        Ok(match verb {
            Verb::Submit => self.submit(reader)?,
            Verb::Abort => u64::from(self.scheduler.abort(RequestId::new(reader.number()?))),
            Verb::Pause => u64::from(self.scheduler.pause(RequestId::new(reader.number()?))),
            Verb::Resume => u64::from(self.scheduler.resume(RequestId::new(reader.number()?))),
            Verb::Plan => {
                let now = reader.real()?;
                self.requests[self.num_planned..].iter_mut().for_each(|request| request.arrival = now);
                self.num_planned = self.requests.len();
                self.plan(now)
            }
            Verb::Propose => self.propose(reader)?,
            Verb::Apply => self.apply(reader)?,
            Verb::Discard => digest_of(&self.scheduler.discard(reader.number()?)),
            Verb::TakeEnded => {
                let ended = self.scheduler.take_ended();
                self.note(&ended);
                digest_of(&ended)
            }
            Verb::ResetPrefixCache => {
                self.scheduler.reset_prefix_cache();
                0
            }
            Verb::SetCosts => {
                let (seconds_per_token, seconds_per_block) = (reader.real()?, reader.real()?);
                let costs = Costs { seconds_per_token, seconds_per_block };
                self.scheduler.set_costs(costs).map_err(|_| reader.malformed("costs that are no times"))?;
                0
            }
            Verb::EndSession => {
                let (tenant, session) = (reader.string()?, reader.string()?);
                u64::from(self.scheduler.end_session(tenant, session))
            }
            Verb::Pin => self.pin(reader)?,
            Verb::Unpin => u64::from(self.scheduler.unpin(PinId::new(reader.number()?))),
            Verb::SetCacheShare => {
                let (tenant, share) = (reader.string()?, reader.real()?);
                digest_of(&self.scheduler.set_cache_share(tenant, share))
            }
        })
    }

    fn submit(&mut self, reader: &mut Reader<'_>) -> Result<u64, ReplayError> {
        let prompt = reader.list(|value| value as u32)?;
        let max_tokens = reader.number()?.checked_sub(1).map(|limit| limit as usize);
        let num_samples = reader.number()? as usize;
        let scope = reader.string()?;
        let reuse_cached = reader.number()? != 0;
        let tenant = reader.string()?;
        let priority = reader.number()? as u32 as i32;
        let has_deadline = reader.number()? != 0;
        let deadline = Some(reader.real()?).filter(|_| has_deadline);
        let retention = reader.retention(tenant)?;
        let media = reader.media()?;
        let result = self.scheduler.submit(Submission {
            prompt: &prompt,
            max_tokens,
            num_samples,
            scope,
            reuse_cached,
            tenant,
            priority,
            deadline,
            retention,
            media: &media,
        });
        let digest = digest_of(&result);
        if result.is_ok() {
            let (scope, tenant) = (scope.to_vec(), tenant.to_vec());
            self.requests.push(RecordedRequest {
                arrival: f64::NAN,
                prompt,
                scope,
                tenant,
                output_tokens: 0,
            });
        }
        Ok(digest)
    }

    /// Requests are numbered in the order in which they were taken.
    fn note(&mut self, ended: &[RequestSummary]) {
        for summary in ended {
            self.requests[summary.request.get() as usize].output_tokens = summary.output_tokens;
        }
    }

    fn propose(&mut self, reader: &mut Reader<'_>) -> Result<u64, ReplayError> {
        let rows = reader.list(|value| value as usize)?;
        let starts = reader.list(|value| value as usize)?;
        let tokens = reader.list(|value| value as u32)?;
        let proposal = Proposal { rows: &rows, starts: &starts, tokens: &tokens };
        Ok(digest_of(&self.scheduler.propose(proposal)))
    }

    /// Plans into the arrays that no step in flight holds.
    fn plan(&mut self, now: f64) -> u64 {
        let scheduler = &mut self.scheduler;
        let planned = self.buffers.iter_mut().find_map(|(arrays, sync)| {
            let arrays = arrays.borrow();
            let result = scheduler.plan(&arrays, sync, now);
            let is_free = !matches!(result, Err(Error::ArraysInFlight { .. }));
            is_free.then(|| plan_digest(&result, &arrays, scheduler.scheduler().config()))
        });
        planned.expect("there are as many as steps may be in flight")
    }

    fn pin(&mut self, reader: &mut Reader<'_>) -> Result<u64, ReplayError> {
        let tokens = reader.list(|value| value as u32)?;
        let (scope, tenant) = (reader.string()?, reader.string()?);
        Ok(digest_of(&self.scheduler.pin(&tokens, scope, tenant)))
    }

    fn apply(&mut self, reader: &mut Reader<'_>) -> Result<u64, ReplayError> {
        let plan = reader.number()?;
        let tokens = reader.list(|value| value as u32)?;
        let outcomes = reader.list(|value| Outcome::from_number(value as u8).unwrap_or(Outcome::Failed))?;
        let failed_rows = reader.list(|value| value as usize)?;
        let has_accepted = reader.number()? != 0;
        let accepted = reader.list(|value| value as usize)?;
        let mut reasons = xxhash_rust::xxh3::Xxh3::new();
        let accepted = has_accepted.then_some(accepted.as_slice());
        let sampled = Sampled { tokens: &tokens, outcomes: &outcomes, failed_rows: &failed_rows, accepted };
        let result =
            self.scheduler.apply(plan, sampled, |_, reason: FinishReason| reasons.update(&[reason as u8]));
        self.note(result.as_deref().unwrap_or_default());
        Ok(reasons.digest() ^ digest_of(&result))
    }
}

/// Reads a chunk.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
    /// Where the chunk's bytes are in the recording.
    start: usize,
}

impl<'a> Reader<'a> {
    fn new(chunk: &Chunk<'a>) -> Self {
        Self { bytes: chunk.bytes, offset: 0, start: chunk.offset }
    }

    fn malformed(&self, problem: &'static str) -> ReplayError {
        ReplayError::Malformed { offset: self.start + self.offset, problem }
    }

    fn config(&mut self) -> Result<SchedulerConfig, ReplayError> {
        let mut numbers = [0; SchedulerConfig::NUM_NUMBERS];
        for number in &mut numbers {
            *number = self.number()?;
        }
        let groups = self.list(|window| match window {
            0 => LayerGroup::Full,
            tokens => LayerGroup::Window { tokens: tokens as usize },
        })?;
        let mut reals = [0.0; SchedulerConfig::NUM_REALS];
        for real in &mut reals {
            *real = self.real()?;
        }
        SchedulerConfig::from_numbers(numbers, groups, reals).map_err(ReplayError::Options)
    }

    fn verb(&mut self) -> Result<Verb, ReplayError> {
        let no_verb = self.malformed("no such verb");
        let number = self.take(1)?[0];
        Verb::from_number(number).ok_or(no_verb)
    }

    fn digest(&mut self) -> Result<u64, ReplayError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn real(&mut self) -> Result<f64, ReplayError> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    fn retention(&mut self, tenant: &'a [u8]) -> Result<Retention<'a>, ReplayError> {
        let session = if self.number()? != 0 { Some(self.string()?) } else { None };
        let ttl = if self.number()? != 0 { Some(self.real()?) } else { None };
        let next_turn = if self.number()? != 0 { Some(self.real()?) } else { None };
        Ok(Retention { session, ttl, next_turn, priority: self.number()? as u8 as i8, tenant })
    }

    fn media(&mut self) -> Result<Vec<Media<'a>>, ReplayError> {
        let len = self.number()?;
        (0..len).map(|_| Ok(Media { offset: self.number()? as usize, hash: self.string()? })).collect()
    }

    fn string(&mut self) -> Result<&'a [u8], ReplayError> {
        let len = self.number()? as usize;
        self.take(len)
    }

    fn list<T>(&mut self, convert: impl Fn(u64) -> T) -> Result<Vec<T>, ReplayError> {
        let len = self.number()?;
        (0..len).map(|_| self.number().map(&convert)).collect()
    }

    fn number(&mut self) -> Result<u64, ReplayError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.malformed("a number of more than 64 bits"))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ReplayError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ReplayError> {
        let end = self.offset.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.malformed("the chunk ends within a call"))?;
        let taken = &self.bytes[self.offset..end];
        self.offset = end;
        Ok(taken)
    }
}
