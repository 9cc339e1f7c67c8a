//! The production scheduler, over symbolic blocks.

use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::Costs;
use pykv_core::prefix::Retention as Lease;
use pykv_core::scheduler::{Outcome, Plan, Sampled, Submission};
use pykv_core::{BlockSize, Error, LayerGroup, Result, Scheduler, SchedulerConfig, TokenId};

use super::cost::{CostModel, Work};
use super::engine::{Ended, Engine, Memory, Row, Swaps};
use super::retention::{Retention, Sessions};
use crate::trace::{Request, Run, Trace};

/// Symbols from here on occur once: what is sampled, and blocks that a prompt fills in part.
const UNIQUE: TokenId = 1 << 31;

/// Requests that wait in the scheduler, of those that came: under first come first served it looks at fewer.
const MAX_WAITING: usize = 64;

/// The production scheduler as an [`Engine`].
pub struct Paged {
    scheduler: Scheduler,
    block_size: BlockSize,
    groups: Vec<LayerGroup>,
    sessions: Sessions,
    /// Whether it is told the outputs' lengths beforehand, as a benchmark that ignores ends tells its engine.
    knows_outputs: bool,
    /// The place in the trace of each request that was taken, and its session.
    places: Vec<(usize, Option<u32>)>,
    num_ended: usize,
    /// Queued requests hold their prompts: no more wait inside than are looked at.
    max_inside: usize,
    num_unique: TokenId,
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    outcomes: Vec<Outcome>,
    plan: Option<Plan>,
}

impl Paged {
    /// A scheduler with these options.
    ///
    /// # Errors
    /// Those of [`Scheduler::new`].
    pub fn new(config: SchedulerConfig, knows_outputs: bool) -> Result<Self> {
        let looks_at_few = config.queue_order == QueueOrder::Fcfs;
        let max_inside =
            if looks_at_few { config.max_num_seqs + MAX_WAITING } else { config.max_queued_requests };
        Ok(Self {
            block_size: BlockSize::new(config.block_size)?,
            groups: config.groups.clone(),
            sessions: Sessions::default(),
            scheduler: Scheduler::symbolic(config)?,
            knows_outputs,
            places: Vec::new(),
            num_ended: 0,
            max_inside,
            num_unique: 0,
            prompt: Vec::new(),
            tokens: Vec::new(),
            outcomes: Vec::new(),
            plan: None,
        })
    }

    /// Has the scheduler told of the sessions of a trace, whose requests come `speed` times as fast.
    #[must_use]
    pub fn with_sessions(mut self, trace: &Trace, retention: Retention, speed: f64) -> Self {
        self.sessions = Sessions::new(trace, retention, speed);
        self
    }

    /// Has the scheduler told what computing and copying cost, as an engine tells it what it measured.
    ///
    /// # Errors
    /// Those of [`Scheduler::set_costs`].
    pub fn with_costs(mut self, cost: &CostModel) -> Result<Self> {
        let mut prompt = Work::default();
        prompt.add(0, MEASURED_TOKENS, cost.window);
        let seconds_per_token = cost.seconds(prompt) / MEASURED_TOKENS as f64;
        self.scheduler.set_costs(Costs { seconds_per_token, seconds_per_block: cost.per_swapped_block })?;
        Ok(self)
    }

    /// A request of a session will not come back: tells the scheduler if the session is over with it.
    fn end_request_of(&mut self, session: Option<u32>) {
        if let Some(session) = session
            && self.sessions.end(session)
        {
            let name = session.to_le_bytes();
            self.scheduler.end_session(&name, &name);
        }
    }

    /// Slots that a sequence of so many tokens has, over all groups, and those of them that hold one.
    fn slots(&self, num_tokens: usize) -> (usize, usize) {
        let size = self.block_size;
        let end = size.blocks_for(num_tokens) * size.tokens();
        let of_group = |group: &LayerGroup| {
            let first = group.first_block(num_tokens.saturating_sub(1), size) * size.tokens();
            (end - first, num_tokens - first)
        };
        self.groups.iter().map(of_group).fold((0, 0), |sum, slots| (sum.0 + slots.0, sum.1 + slots.1))
    }

    /// The prompt of a request: at the start of each block its symbol, elsewhere whatever stands there.
    fn write_prompt(&mut self, request: &Request, runs: &[Run]) {
        let size = self.block_size;
        self.prompt.resize(request.prompt_tokens as usize, 0);
        let full = size.full_blocks(self.prompt.len());
        let mut symbols = runs.iter().flat_map(|run| run.start..run.start + run.length).take(full);
        for start in (0..self.prompt.len()).step_by(size.tokens()) {
            self.prompt[start] = symbols.next().unwrap_or_else(|| unique(&mut self.num_unique));
        }
    }
}

/// Tokens of the prompt by which a cost model says what one of them takes.
const MEASURED_TOKENS: usize = 512;

/// A symbol that was not used before.
fn unique(count: &mut TokenId) -> TokenId {
    *count = count.wrapping_add(1);
    UNIQUE | *count
}

impl Engine for Paged {
    fn takes_more(&self) -> bool {
        self.places.len() - self.num_ended < self.max_inside
    }

    fn submit(&mut self, place: usize, request: &Request, runs: &[Run]) -> Result<bool> {
        self.write_prompt(request, runs);
        let max_tokens = self.knows_outputs.then_some(request.output_tokens.max(1) as usize);
        let session = request.session.map(u32::to_le_bytes);
        let session = session.as_ref().map(|bytes| &bytes[..]);
        // Shares are fair between sessions: a trace knows no other tenants.
        let tenant = session.unwrap_or_default();
        let terms = self.sessions.terms(place).filter(|_| session.is_some());
        let retention = terms.map_or(Lease::default(), |terms| Lease {
            session,
            ttl: terms.ttl,
            next_turn: terms.next_turn,
            ..Lease::default()
        });
        let submission = Submission { max_tokens, tenant, retention, ..Submission::new(&self.prompt) };
        match self.scheduler.submit(submission) {
            Ok(_) => self.places.push((place, request.session)),
            Err(Error::NeverFits { .. }) => {
                self.end_request_of(request.session);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn begin(&mut self, now: f64) -> Result<Option<Swaps>> {
        self.plan = self.scheduler.plan_unwritten(now)?;
        Ok(self.plan.map(|plan| Swaps { out: plan.num_swap_outs, back: plan.num_swap_ins }))
    }

    fn rows(&self, rows: &mut Vec<Row>) {
        rows.extend(self.scheduler.step_rows().map(|row| {
            let (reserved_slots, held_slots) = self.slots(row.num_computed + row.num_tokens);
            Row {
                request: self.places[row.request.get() as usize].0,
                num_computed: row.num_computed,
                num_tokens: row.num_tokens,
                samples: row.num_samples > 0,
                reserved_slots,
                held_slots,
            }
        }));
    }

    fn memory(&mut self) -> Memory {
        let stats = self.scheduler.stats();
        let size = self.block_size.tokens();
        Memory {
            total_slots: stats.blocks.total * size,
            reserved_slots: stats.blocks.active * size,
            held_tokens: stats.held_tokens,
            cached_slots: stats.blocks.cached * size,
            largest_free_slots: (stats.blocks.total - stats.blocks.active) * size,
            running: stats.num_running,
            waiting: stats.num_waiting,
            preemptions: stats.preemptions,
        }
    }

    fn end(&mut self, is_last: &[bool]) -> Result<Vec<Ended>> {
        let Some(plan) = self.plan.take() else { return Ok(Vec::new()) };
        self.tokens.clear();
        self.tokens.extend(is_last.iter().map(|_| unique(&mut self.num_unique)));
        self.outcomes.clear();
        self.outcomes.extend(is_last.iter().map(|last| if *last { Outcome::Stop } else { Outcome::Ok }));
        let sampled =
            Sampled { tokens: &self.tokens, outcomes: &self.outcomes, failed_rows: &[], accepted: None };
        let ended = self.scheduler.apply(plan.id, sampled, |_, _| {})?;
        self.num_ended += ended.len();
        for summary in &ended {
            self.end_request_of(self.places[summary.request.get() as usize].1);
        }
        let ended = ended.into_iter().map(|summary| Ended {
            request: self.places[summary.request.get() as usize].0,
            preemptions: summary.preemptions,
            recomputed_tokens: summary.recomputed_tokens,
            swapped_blocks: summary.swapped_blocks,
            stalled_seconds: summary.stalled_seconds,
        });
        Ok(ended.collect())
    }
}
