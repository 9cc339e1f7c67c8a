//! Virtual time: requests come when the trace says, each step takes what a cost model says, and nothing else takes time.

mod allocator;
mod columns;
mod contiguous;
mod cost;
mod engine;
mod first_fit;
mod misses;
mod paged;
mod retention;
mod series;

pub use allocator::{Allocator, Told};
pub use contiguous::{Contiguous, Limits, Reservation};
pub use cost::{CostModel, Work};
pub use engine::{Ended, Engine, Memory, Row, Swaps};
pub use misses::Lookups;
pub use paged::Paged;
pub use retention::Retention;
pub use series::Point;

use misses::History;
use pykv_core::{Error, Result};
use series::Series;

use crate::trace::{Request, Trace};

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// As the trace says, so many times as fast.
    Trace {
        /// 1: as it was.
        speed: f64,
    },
    /// So many are always there: when one ends, the next one comes.
    Closed {
        /// How many.
        concurrency: usize,
    },
}

/// What became of one request. Times are in seconds; not a number: it did not come to that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// When it came.
    pub arrival: f64,
    /// When the first step began that computed some of it.
    pub started: f64,
    /// When its first token was there.
    pub first_token: f64,
    /// When its last one was.
    pub ended: f64,
    /// Tokens that it got.
    pub output_tokens: usize,
    /// Tokens of its prompt that it found when it started.
    pub cached_tokens: usize,
    /// What it went through.
    pub pressure: Ended,
}

/// A replay that has ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// By their place in the trace.
    pub requests: Vec<Served>,
    /// Requests that could never run.
    pub refused: usize,
    /// Requests that ended at the context cap, before their output was whole.
    pub cut: usize,
    /// Tokens that these did not get.
    pub cut_tokens: u64,
    /// Tokens of the prompts that were looked up: of all that started.
    pub queried_tokens: u64,
    /// Those of them that were found.
    pub hit_tokens: u64,
    /// Steps.
    pub steps: u64,
    /// Steps in which somebody was preempted.
    pub preempting_steps: u64,
    /// Tokens that were computed.
    pub computed_tokens: u64,
    /// When the last step ended, in seconds.
    pub seconds: f64,
    /// Of each decode: slots that were kept for it, added up.
    pub decode_reserved_slots: u64,
    /// Of each decode: those of them that held a token, added up.
    pub decode_held_slots: u64,
    /// Requests that ran at once at most.
    pub max_running: usize,
    /// Slots of the memory.
    pub total_slots: usize,
    /// Blocks copied to the host.
    pub swapped_out_blocks: u64,
    /// Blocks copied back from it.
    pub swapped_in_blocks: u64,
    /// Blocks of the prompts, by what the lookup gave.
    pub lookups: Lookups,
    /// Over time.
    pub points: Vec<Point>,
}

/// Points of the series over time.
const MAX_POINTS: usize = 512;

/// Steps after which it is asked whether to go on.
const STEPS_BETWEEN_LOOKS: u64 = 4096;

/// Replays a trace on an engine, as far as `goes_on` allows: it is asked now and then.
///
/// # Errors
/// [`Error::InvalidConfig`] for a cost model or arrivals that cannot be; those of the engine.
pub fn replay(
    trace: &Trace,
    engine: &mut impl Engine,
    cost: &CostModel,
    arrivals: Arrivals,
    mut goes_on: impl FnMut() -> bool,
) -> Result<Outcome> {
    cost.validate()?;
    arrivals.validate()?;
    let mut run = Run::new(trace, arrivals);
    loop {
        if run.outcome.steps.is_multiple_of(STEPS_BETWEEN_LOOKS) && !goes_on() {
            return Ok(run.finish());
        }
        run.submit(engine)?;
        match engine.begin(run.now)? {
            Some(swaps) => run.step(engine, cost, swaps)?,
            None if run.submitted == trace.requests().len() => return Ok(run.finish()),
            None => run.now = run.now.max(arrivals.time(&trace.requests()[run.submitted])),
        }
    }
}

impl Arrivals {
    fn validate(self) -> Result<()> {
        match self {
            Self::Trace { speed } if !(speed > 0.0 && speed.is_finite()) => {
                Err(Error::config("speed", speed, "a finite number above 0"))
            }
            Self::Closed { concurrency: 0 } => Err(Error::config("concurrency", 0, "at least 1")),
            _ => Ok(()),
        }
    }

    /// The time from which a request may come.
    fn time(self, request: &Request) -> f64 {
        match self {
            Self::Trace { speed } => request.arrival / speed,
            Self::Closed { .. } => 0.0,
        }
    }
}

struct Run<'a> {
    trace: &'a Trace,
    arrivals: Arrivals,
    now: f64,
    /// Requests that were given to the engine, or refused by it.
    submitted: usize,
    num_ended: usize,
    preemptions: u64,
    history: History,
    series: Series,
    outcome: Outcome,
    rows: Vec<Row>,
    is_last: Vec<bool>,
}

impl<'a> Run<'a> {
    fn new(trace: &'a Trace, arrivals: Arrivals) -> Self {
        Self {
            trace,
            arrivals,
            now: 0.0,
            submitted: 0,
            num_ended: 0,
            preemptions: 0,
            history: History::new(trace),
            series: Series::new(MAX_POINTS),
            outcome: Outcome::default(),
            rows: Vec::new(),
            is_last: Vec::new(),
        }
    }

    /// Gives the engine the requests that have come.
    fn submit(&mut self, engine: &mut impl Engine) -> Result<()> {
        let limit = match self.arrivals {
            Arrivals::Trace { .. } => usize::MAX,
            Arrivals::Closed { concurrency } => concurrency,
        };
        while let Some(request) = self.trace.requests().get(self.submitted)
            && self.submitted - self.num_ended < limit
            && self.arrivals.time(request) <= self.now
            && engine.takes_more()
        {
            let place = self.submitted;
            let arrival = match self.arrivals {
                Arrivals::Trace { .. } => self.arrivals.time(request),
                Arrivals::Closed { .. } => self.now,
            };
            self.outcome.requests.push(Served {
                arrival,
                started: f64::NAN,
                first_token: f64::NAN,
                ended: f64::NAN,
                output_tokens: 0,
                cached_tokens: 0,
                pressure: Ended { request: place, ..Ended::default() },
            });
            self.submitted += 1;
            if !engine.submit(place, request, self.trace.runs(place))? {
                self.outcome.refused += 1;
                self.num_ended += 1;
            }
        }
        Ok(())
    }

    fn step(&mut self, engine: &mut impl Engine, cost: &CostModel, swaps: Swaps) -> Result<()> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.clear();
        engine.rows(&mut rows);
        let mut work = Work { swapped_blocks: (swaps.out + swaps.back) as u64, ..Work::default() };
        for row in &rows {
            work.add(row.num_computed, row.num_tokens, cost.window);
            self.look(row);
        }
        let seconds = cost.seconds(work);
        let memory = engine.memory();
        let waiting = memory.waiting + self.num_outside();
        self.series.push(self.now, seconds, memory, waiting, work.tokens);
        self.outcome.steps += 1;
        self.outcome.preempting_steps += u64::from(memory.preemptions > self.preemptions);
        self.preemptions = memory.preemptions;
        self.outcome.computed_tokens += work.tokens;
        self.outcome.swapped_out_blocks += swaps.out as u64;
        self.outcome.swapped_in_blocks += swaps.back as u64;
        self.outcome.total_slots = memory.total_slots;
        self.outcome.max_running = self.outcome.max_running.max(memory.running);
        self.now += seconds;
        self.is_last.clear();
        for row in &rows {
            self.take_in(row);
        }
        self.rows = rows;
        for ended in engine.end(&self.is_last)? {
            let served = &mut self.outcome.requests[ended.request];
            served.ended = self.now;
            served.pressure = ended;
            self.num_ended += 1;
            let wanted = self.trace.requests()[ended.request].output_tokens as usize;
            let missing = wanted.saturating_sub(served.output_tokens);
            self.outcome.cut += usize::from(missing > 0);
            self.outcome.cut_tokens += missing as u64;
        }
        Ok(())
    }

    /// Requests that have come and were not given to the engine yet.
    fn num_outside(&self) -> usize {
        if matches!(self.arrivals, Arrivals::Closed { .. }) {
            return 0;
        }
        let rest = &self.trace.requests()[self.submitted..];
        rest.partition_point(|request| self.arrivals.time(request) <= self.now)
    }

    /// A row that is about to be computed.
    fn look(&mut self, row: &Row) {
        let served = &mut self.outcome.requests[row.request];
        if served.started.is_nan() {
            served.started = self.now;
            served.cached_tokens = row.num_computed;
            self.outcome.queried_tokens += u64::from(self.trace.requests()[row.request].prompt_tokens);
            self.outcome.hit_tokens += row.num_computed as u64;
            self.history.start(self.trace, row.request, row.num_computed);
        }
    }

    /// A row that was computed.
    fn take_in(&mut self, row: &Row) {
        let end = row.num_computed + row.num_tokens;
        let request = &self.trace.requests()[row.request];
        if row.num_computed < request.prompt_tokens as usize {
            self.history.compute(self.trace, row.request, row.num_computed, end);
        } else if row.num_tokens == 1 {
            self.outcome.decode_reserved_slots += row.reserved_slots as u64;
            self.outcome.decode_held_slots += row.held_slots as u64;
        }
        if row.samples {
            let served = &mut self.outcome.requests[row.request];
            if served.output_tokens == 0 {
                served.first_token = self.now;
            }
            served.output_tokens += 1;
            self.is_last.push(served.output_tokens >= request.output_tokens as usize);
        }
    }

    fn finish(mut self) -> Outcome {
        self.outcome.seconds = self.now;
        self.outcome.lookups = self.history.lookups;
        self.outcome.points = self.series.into_points();
        self.outcome
    }
}

#[cfg(test)]
mod tests;
