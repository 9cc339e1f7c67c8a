//! The continuous-batching scheduler: `submit`, `plan`, `apply`, `discard`, `abort`, `pause`. It never calls out.
//!
//! ```text
//! submit ─▶ waiting ──plan: admitted──▶ running ──apply: stop, length, error──▶ ended
//!              ▲                          │
//!              └──── plan: preempted ─────┘
//! ```
//! Running and waiting sequences are kept in one order: by rank (which the configured order gives), then by age. A
//! sequence is preempted only for one that comes before it: the first one that runs is never preempted, and since every
//! request fits the pool alone, it ends; so does every other one in turn.

mod admission;
mod apply;
mod buffers;
mod check;
mod config;
mod failure;
mod fair;
mod folding;
mod in_flight;
mod misses;
mod observed;
mod pages;
mod partial;
mod pause;
mod plan;
mod prefilling;
mod ranks;
mod recorded_config;
mod request;
mod reserve;
mod retention;
mod sequence;
mod sequence_states;
mod simulated;
mod speculation;
mod states;
mod stats;
mod step;
mod swap;
mod takeover;
mod watch;
mod write;

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::{HashMap, HashSet};

pub use apply::{FinishReason, Outcome, Sampled};
pub use buffers::{OwnedArrays, StepArrays, TableSync};
pub use config::{AdmissionPolicy, SchedulerConfig};
pub use pages::{OwnedPageLists, PageLists};
pub use request::{RequestSummary, Submission};
pub use simulated::StepRow;
pub use speculation::Proposal;
pub use stats::{Peak, SchedulerStats};
pub use step::Plan;

use crate::error::{Error, Result};
use crate::memory::check_memory;
use crate::policy::fair::{FairShares, unstarted_rank};
use crate::policy::forecast::Growth;
use crate::policy::length::OutputEstimate;
use crate::policy::order::{QueueOrder, priority_rank};
use crate::policy::preemption::Costs;
use crate::pool::BlockPool;
use crate::prefix::{Media, PrefixCache, Retention};
use crate::states::Home;
use crate::table::BlockTable;
use crate::units::{BlockSize, RequestId, Row};
use admission::Vacancy;
use buffers::Identity;
use in_flight::InFlight;
use pause::Paused;
use prefilling::Prefilling;
use request::{Deadline, Request};
use sequence::{Arena, SeqIndex, SeqKey, Sequence};
use speculation::Drafts;
use stats::Totals;

/// The scheduler of one pool.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    block_size: BlockSize,
    cache: PrefixCache,
    /// Whether a layer group gives back what left its window.
    has_windows: bool,
    /// Where preempted sequences may be copied.
    host: Option<BlockPool>,
    costs: Costs,
    requests: HashMap<RequestId, Request>,
    sequences: Arena,
    waiting: BTreeMap<SeqKey, SeqIndex>,
    /// Samples that wait, those included that are not forked off yet.
    num_queued: usize,
    /// Tokens of what waits.
    num_queued_tokens: usize,
    deadlines: BTreeSet<(Deadline, RequestId)>,
    shares: FairShares,
    /// Whether a sequence that could not start when last looked at might start now.
    queue_changed: bool,
    /// What those that could not start could have had then.
    vacancy_seen: Vacancy,
    /// The step in which they were looked at.
    last_look: u64,
    /// Who was the first of them when last tried with others giving way.
    first_tried: Option<SeqKey>,
    /// By age.
    running: Vec<SeqIndex>,
    /// Whether some of them may have stopped since the last step was over.
    has_stopped: bool,
    paused: Paused,
    prefilling: Prefilling,
    /// Samples that the step at hand has forked off.
    forked: Vec<SeqIndex>,
    free_rows: Vec<Row>,
    identity: Identity,
    /// What was proposed for the next plan.
    drafts: Drafts,
    in_flight: InFlight,
    /// Running sequences that the plan at hand leaves out, so that the next one can preempt them.
    held_back: HashSet<SeqIndex>,
    /// The time of the last plan, in seconds.
    now: f64,
    next_request: u64,
    next_step: u64,
    next_epoch: u64,
    /// Requests whose abort waits for the steps in flight.
    aborts: Vec<RequestId>,
    ended: Vec<RequestSummary>,
    totals: Totals,
    outputs: OutputEstimate,
    growths: Vec<Growth>,
    /// Those that may start in the step at hand.
    candidates: Vec<plan::Waiting>,
    /// Those that are at a place for a checkpoint behind the step at hand.
    checkpointed: Vec<SeqIndex>,
    /// The checkpoints that live sequences would start again from.
    homes: BTreeMap<SeqKey, Home>,
}

impl Scheduler {
    /// A scheduler with an empty pool.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] with the option that is not allowed; [`Error::OutOfMemory`].
    pub fn new(config: SchedulerConfig) -> Result<Self> {
        config.validate()?;
        let block_size = BlockSize::new(config.block_size)?;
        let pool = BlockPool::new(config.num_blocks, block_size)?;
        let mut cache = PrefixCache::with_options(pool, &config.groups, config.cache_options())?;
        if config.has_states() {
            check_memory("bookkeeping of num_state_slots", config.num_state_slots, 64)?;
            cache.keep_states(config.num_state_slots);
        }
        Ok(Self {
            block_size,
            cache,
            has_windows: config.groups.iter().any(|group| !group.is_full()),
            host: (config.num_host_blocks > 1)
                .then(|| BlockPool::new(config.num_host_blocks, block_size))
                .transpose()?,
            costs: Costs::default(),
            requests: HashMap::new(),
            sequences: Arena::default(),
            waiting: BTreeMap::new(),
            num_queued: 0,
            num_queued_tokens: 0,
            deadlines: BTreeSet::new(),
            shares: FairShares::default(),
            queue_changed: false,
            vacancy_seen: Vacancy::default(),
            last_look: 0,
            first_tried: None,
            running: Vec::with_capacity(config.max_num_seqs),
            has_stopped: false,
            paused: Paused::default(),
            prefilling: Prefilling::default(),
            forked: Vec::new(),
            free_rows: (0..config.max_num_seqs as u32).rev().map(Row::new).collect(),
            identity: Identity::default(),
            drafts: Drafts::default(),
            in_flight: InFlight::default(),
            held_back: HashSet::new(),
            now: 0.0,
            next_request: 0,
            next_step: 0,
            next_epoch: 1,
            aborts: Vec::new(),
            ended: Vec::new(),
            totals: Totals::default(),
            outputs: OutputEstimate::default(),
            growths: Vec::new(),
            candidates: Vec::new(),
            checkpointed: Vec::new(),
            homes: BTreeMap::new(),
            config,
        })
    }

    /// The options.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The pool that is scheduled.
    pub fn pool(&self) -> &BlockPool {
        self.cache.pool()
    }

    /// Queues a request. Nothing of the pool is taken yet.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::NeverFits`] for what can never run, [`Error::QueueFull`].
    pub fn submit(&mut self, submission: Submission<'_>) -> Result<RequestId> {
        self.check_submission(&submission)?;
        // Nothing below can fail.
        let request = RequestId::new(self.next_request);
        self.next_request += 1;
        let scope = self.cache.enter_scope_with_media(submission.scope, submission.media);
        let lease = self.cache.open_lease(&Retention { tenant: submission.tenant, ..submission.retention });
        let rank = self.rank(&submission);
        let key = SeqKey { rank, request, child: 0 };
        let tables = self.config.groups.iter().map(|_| BlockTable::new(self.cache.pool())).collect();
        let (cap, root) = (self.config.cap(), self.cache.root());
        let mut sequence = Sequence::first(key, scope, &submission, cap, tables, root);
        sequence.reuse_cached &= self.config.enable_prefix_caching;
        let index = self.sequences.insert(sequence);
        self.requests.insert(request, Request::new(request, scope, lease, rank, &submission));
        if let Some(seconds) = submission.deadline {
            self.deadlines.insert((Deadline::at(seconds), request));
        }
        self.enqueue(index);
        Ok(request)
    }

    /// Ends a request: at once, or with the last step in flight that has a row for it. Returns whether it lived.
    pub fn abort(&mut self, request: RequestId) -> bool {
        let Some(entry) = self.requests.get_mut(&request) else { return false };
        let is_new = !std::mem::replace(&mut entry.summary.aborted, true);
        if self.in_flight.is_empty() {
            self.end_request(request);
        } else if is_new {
            self.aborts.push(request);
        }
        true
    }

    /// The requests that ended since the last call, or since the last `apply`.
    pub fn take_ended(&mut self) -> Vec<RequestSummary> {
        std::mem::take(&mut self.ended)
    }

    /// Makes nothing of what was computed so far findable any more, nor what depends on it: what runs or is swapped out goes
    /// on and publishes nothing more.
    pub fn reset_prefix_cache(&mut self) {
        self.cache.reset();
        self.queue_changed = true;
    }

    fn check_submission(&self, submission: &Submission<'_>) -> Result<()> {
        let (cap, prompt) = (self.config.cap(), submission.prompt.len());
        if prompt == 0 {
            return Err(Error::request("prompt", "empty", "at least one token"));
        }
        if submission.max_tokens == Some(0) {
            return Err(Error::request("max_tokens", 0, "at least 1"));
        }
        let (rows, queue) = (self.config.max_num_seqs, self.config.max_queued_requests);
        if !(1..=rows.min(queue)).contains(&submission.num_samples) {
            let allowed =
                format!("1 to {} (of max_num_seqs {rows} and max_queued_requests {queue})", rows.min(queue));
            return Err(Error::request("num_samples", submission.num_samples, allowed));
        }
        // Besides the initial state and a slot for each sample, one is needed to start again from.
        let slots = self.config.num_state_slots.saturating_sub(2);
        if self.config.has_states() && submission.num_samples > slots {
            let allowed = format!("1 to {slots} (of num_state_slots {})", slots + 2);
            return Err(Error::request("num_samples", submission.num_samples, allowed));
        }
        if prompt >= cap {
            let (max_model_len, pool) = (self.config.max_model_len, self.config.pool_cap());
            return Err(Error::NeverFits { prompt, cap, max_model_len, pool });
        }
        let queue_tokens = self.config.max_queued_tokens;
        if prompt > queue_tokens {
            let allowed = format!("at most {queue_tokens} tokens (max_queued_tokens)");
            return Err(Error::request("prompt", format!("{prompt} tokens long"), allowed));
        }
        if let Some(seconds) = submission.deadline.filter(|seconds| !(0.0..f64::INFINITY).contains(seconds)) {
            return Err(Error::request("deadline", seconds, "a finite number of seconds, at least 0"));
        }
        submission.retention.validate()?;
        Media::check(submission.media, prompt)?;
        let config = &self.config;
        check_queue(
            "sequences",
            "max_queued_requests",
            self.num_queued,
            submission.num_samples,
            config.max_queued_requests,
        )?;
        check_queue("tokens", "max_queued_tokens", self.num_queued_tokens, prompt, config.max_queued_tokens)
    }

    /// A request's rank under the configured order. Under fair shares it gets another one when it starts.
    fn rank(&mut self, submission: &Submission<'_>) -> u64 {
        match self.config.queue_order {
            QueueOrder::Fcfs | QueueOrder::LongestPrefix => 0,
            QueueOrder::Priority => priority_rank(submission.priority),
            QueueOrder::FairShare => unstarted_rank(self.shares.enter(submission.tenant, self.outputs)),
        }
    }

    fn enqueue(&mut self, index: SeqIndex) {
        let sequence = &self.sequences[index];
        self.num_queued += sequence.num_samples;
        self.num_queued_tokens += sequence.tokens.len();
        self.queue_changed = true;
        let key = sequence.key;
        self.waiting.insert(key, index);
        self.update_turn(key);
    }

    fn dequeue(&mut self, key: SeqKey) {
        if let Some(index) = self.waiting.remove(&key) {
            self.num_queued -= self.sequences[index].num_samples;
            self.num_queued_tokens -= self.sequences[index].tokens.len();
            self.update_turn(key);
        }
    }

    /// Takes everything from a running sequence but its tokens.
    fn stop_running(&mut self, index: SeqIndex) {
        self.mark_blocks(index);
        self.give_back_states(index);
        let sequence = &mut self.sequences[index];
        sequence.pop_placeholder();
        (sequence.is_leaving, sequence.is_void) = (false, false);
        sequence.tables.iter_mut().for_each(|table| table.truncate(0));
        sequence.cursor = self.cache.root();
        (sequence.num_computed, sequence.num_planned) = (0, 0);
        // In reverse, so that a sequence that starts next gets the same rows in the same order.
        while let Some(row) = sequence.rows.pop() {
            self.free_rows.push(row);
        }
        self.has_stopped = true;
        self.queue_changed = true;
    }

    /// Ends one sequence. The caller takes it out of `running`.
    fn end_sequence(&mut self, index: SeqIndex) {
        self.stop_running(index);
        self.end_stall(index);
        let key = self.sequences[index].key;
        self.leave_home(key);
        self.dequeue(key);
        let sequence = self.sequences.remove(index);
        let request = self.requests.get_mut(&key.request).expect("a live sequence has a request");
        request.num_live -= sequence.num_samples;
        request.summary.output_tokens += sequence.tokens.len() - sequence.prompt_len;
        let (tenant, num_live) = (request.tenant, request.num_live);
        if let Some(tenant) = tenant {
            self.settle_shares(tenant, &sequence);
        }
        if num_live == 0 {
            let request = self.requests.remove(&key.request).expect("it was there");
            self.paused.forget(key.request);
            self.cache.leave_scope(request.scope);
            self.cache.close_lease(request.lease, self.now);
            if let Some(deadline) = request.deadline {
                self.deadlines.remove(&(deadline, key.request));
            }
            if let Some(tenant) = tenant {
                self.shares.leave(tenant);
            }
            self.ended.push(request.summary);
            if self.requests.is_empty() {
                self.shares.rest();
            }
        }
    }

    /// Ends all of a request that no step in flight has a row for.
    fn end_request(&mut self, request: RequestId) {
        let mut indices: Vec<SeqIndex> =
            self.waiting_of(request).into_iter().map(|(_, index)| index).collect();
        indices.extend(self.take_paused(request));
        let running = self.running_of(request);
        let is_in_flight = |&index: &SeqIndex| self.sequences[index].is_in_flight();
        let (kept, ended): (Vec<_>, Vec<_>) =
            self.running[running.clone()].iter().partition(|&index| is_in_flight(index));
        self.running.splice(running, kept);
        indices.extend(ended);
        for index in indices {
            self.learn_output(index, OutputEstimate::learn_cut);
            self.end_sequence(index);
        }
        self.sequences.recycle();
    }

    /// The sequences of a request that wait.
    fn waiting_of(&self, request: RequestId) -> Vec<(SeqKey, SeqIndex)> {
        let Some(entry) = self.requests.get(&request) else { return Vec::new() };
        let first = SeqKey { rank: entry.rank, request, child: 0 };
        let waiting = self.waiting.range(first..=SeqKey { child: u32::MAX, ..first });
        waiting.map(|(&key, &index)| (key, index)).collect()
    }

    /// The places among those that run of a request's sequences: they stand together. Nobody there may have stopped.
    fn running_of(&self, request: RequestId) -> std::ops::Range<usize> {
        let Some(entry) = self.requests.get(&request) else { return 0..0 };
        let ends_before =
            |index: SeqIndex, child| self.sequences[index].key < SeqKey { rank: entry.rank, request, child };
        let first = self.running.partition_point(|&index| ends_before(index, 0));
        first..self.running.partition_point(|&index| ends_before(index, u32::MAX))
    }

    /// Everything that holds rows and blocks.
    fn placed(&self) -> impl Iterator<Item = &Sequence> {
        let indices = self.running.iter().copied().chain(self.paused.iter_placed());
        indices.map(|index| &self.sequences[index])
    }

    /// Puts a sequence among the running ones, by age.
    fn run(&mut self, index: SeqIndex) {
        let key = self.sequences[index].key;
        let place = self.running.partition_point(|&other| self.sequences[other].key < key);
        self.running.insert(place, index);
    }

    /// Ends the requests whose deadline has passed before something of them was computed. Who is in a step in flight goes on,
    /// unless that step is taken back.
    fn expire(&mut self) {
        let now = Deadline::at(self.now);
        while let Some(&(deadline, request)) = self.deadlines.first()
            && deadline < now
        {
            self.deadlines.pop_first();
            let mut running = self.running[self.running_of(request)].iter();
            let is_computed = running.any(|&index| self.sequences[index].is_in_flight());
            if let Some(entry) = self.requests.get_mut(&request).filter(|_| !is_computed) {
                entry.summary.expired = true;
                self.end_request(request);
            }
        }
    }

    fn new_epoch(&mut self) -> u64 {
        self.next_epoch += 1;
        self.next_epoch
    }
}

fn check_queue(
    unit: &'static str,
    option: &'static str,
    queued: usize,
    asked: usize,
    limit: usize,
) -> Result<()> {
    if queued.saturating_add(asked) > limit {
        return Err(Error::QueueFull { unit, option, queued, asked, limit });
    }
    Ok(())
}
