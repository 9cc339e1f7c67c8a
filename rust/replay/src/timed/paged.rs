//! The production scheduler, over symbolic blocks.

use pykv_core::policy::order::QueueOrder;
use pykv_core::scheduler::{Outcome, Plan, Sampled, Submission};
use pykv_core::{BlockSize, Error, Result, Scheduler, SchedulerConfig, TokenId};

use super::engine::{Ended, Engine, Memory, Row};
use crate::trace::{Request, Run};

/// Symbols from here on occur once: what is sampled, and blocks that a prompt fills in part.
const UNIQUE: TokenId = 1 << 31;

/// Requests that wait in the scheduler, of those that came: under first come first served it looks at fewer.
const MAX_WAITING: usize = 64;

/// The production scheduler as an [`Engine`].
pub struct Paged {
    scheduler: Scheduler,
    block_size: BlockSize,
    /// Whether it is told the outputs' lengths beforehand, as a benchmark that ignores ends tells its engine.
    knows_outputs: bool,
    /// The place in the trace of each request that was taken.
    places: Vec<usize>,
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
        let tenant = request.session.map(u32::to_le_bytes);
        let tenant = tenant.as_ref().map_or(&[][..], |bytes| &bytes[..]);
        match self.scheduler.submit(Submission { max_tokens, tenant, ..Submission::new(&self.prompt) }) {
            Ok(_) => self.places.push(place),
            Err(Error::NeverFits { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn begin(&mut self, now: f64) -> Result<Option<usize>> {
        self.plan = self.scheduler.plan_unwritten(now)?;
        Ok(self.plan.map(|plan| plan.num_swap_outs + plan.num_swap_ins))
    }

    fn rows(&self, rows: &mut Vec<Row>) {
        rows.extend(self.scheduler.step_rows().map(|row| {
            let num_tokens = row.num_computed + row.num_tokens;
            Row {
                request: self.places[row.request.get() as usize],
                num_computed: row.num_computed,
                num_tokens: row.num_tokens,
                samples: row.num_samples > 0,
                reserved_slots: self.block_size.blocks_for(num_tokens) * self.block_size.tokens(),
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
        let ended = ended.into_iter().map(|summary| Ended {
            request: self.places[summary.request.get() as usize],
            preemptions: summary.preemptions,
            recomputed_tokens: summary.recomputed_tokens,
            swapped_blocks: summary.swapped_blocks,
            stalled_seconds: summary.stalled_seconds,
        });
        Ok(ended.collect())
    }
}
