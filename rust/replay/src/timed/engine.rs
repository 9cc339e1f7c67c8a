//! What serves requests step by step: the production scheduler, or one that keeps each request in one piece.

use pykv_core::Result;

use crate::trace::{Request, Run};

/// A batch row of the step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which request, by its place in the trace.
    pub request: usize,
    /// Tokens that were computed before.
    pub num_computed: usize,
    /// Tokens that the step computes.
    pub num_tokens: usize,
    /// Whether a token is sampled after them.
    pub samples: bool,
    /// Slots that are kept for the request, over all layer groups.
    pub reserved_slots: usize,
    /// Those of them that hold a token after the step.
    pub held_slots: usize,
}

/// Blocks that a step copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swaps {
    /// To the host.
    pub out: usize,
    /// Back from it.
    pub back: usize,
}

/// The memory at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Slots that can hold a token.
    pub total_slots: usize,
    /// Slots that are kept for running requests, a shared one counted once.
    pub reserved_slots: usize,
    /// Those of them that hold a token.
    pub held_tokens: usize,
    /// Slots of cached blocks that nobody uses.
    pub cached_slots: usize,
    /// The longest unbroken piece of what is neither reserved nor held; for blocks, all of it.
    pub largest_free_slots: usize,
    /// Requests that run.
    pub running: usize,
    /// Requests that wait inside.
    pub waiting: usize,
    /// How often somebody was preempted so far.
    pub preemptions: u64,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ended {
    /// By its place in the trace.
    pub request: usize,
    /// How often it was preempted.
    pub preemptions: usize,
    /// Tokens that were computed again after that.
    pub recomputed_tokens: usize,
    /// Blocks that were copied to the host.
    pub swapped_blocks: usize,
    /// Seconds that it waited to go on.
    pub stalled_seconds: f64,
}

/// Serves requests step by step, in virtual time.
pub trait Engine {
    /// Whether another request may be submitted now; if not, it is offered again later.
    fn takes_more(&self) -> bool;

    /// Queues a request. Returns whether it can ever run.
    ///
    /// # Errors
    /// Those of a broken scheduler.
    fn submit(&mut self, place: usize, request: &Request, runs: &[Run]) -> Result<bool>;

    /// Begins a step. Returns what it copies to and from the host, or none if there is nothing to do.
    ///
    /// # Errors
    /// Those of a broken scheduler.
    fn begin(&mut self, now: f64) -> Result<Option<Swaps>>;

    /// The batch rows of the step in flight.
    fn rows(&self, rows: &mut Vec<Row>);

    /// The memory while the step is in flight.
    fn memory(&mut self) -> Memory;

    /// Ends the step. `is_last` says for each sample, in the order of the rows, whether it is its request's last.
    ///
    /// # Errors
    /// Those of a broken scheduler.
    fn end(&mut self, is_last: &[bool]) -> Result<Vec<Ended>>;
}
