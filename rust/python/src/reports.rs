//! What a scheduler tells Python: plans, ended requests and counts.

use pykv_core::scheduler::{Plan as CorePlan, RequestSummary as CoreSummary, SchedulerStats as CoreStats};
use pyo3::prelude::*;

use crate::step_buffers::StepBuffers;

/// A step that was planned: how many entries of its buffers are filled.
#[pyclass(frozen, get_all, module = "pykv._core")]
pub(crate) struct Plan {
    pub(crate) id: u64,
    num_tokens: usize,
    num_batch_rows: usize,
    num_decodes: usize,
    num_draft_rows: usize,
    num_samples: usize,
    num_swap_outs: usize,
    num_swap_ins: usize,
    num_copies: usize,
    num_state_restores: usize,
    num_state_saves: usize,
    num_placed: usize,
    /// The scheduler that planned it.
    pub(crate) scheduler: u64,
    pub(crate) buffers: Py<StepBuffers>,
}

/// A request that has ended.
#[pyclass(frozen, get_all, module = "pykv._core")]
pub(crate) struct RequestSummary {
    request: u64,
    prompt_tokens: usize,
    cached_tokens: usize,
    partial_hit_tokens: usize,
    missed_never_seen: usize,
    missed_evicted: usize,
    missed_other_scope: usize,
    missed_in_flight: usize,
    missed_cap: usize,
    output_tokens: usize,
    preemptions: usize,
    recomputed_tokens: usize,
    swapped_blocks: usize,
    stalled_seconds: f64,
    expired: bool,
    aborted: bool,
    failed: bool,
}

/// What a scheduler counts.
#[pyclass(frozen, get_all, module = "pykv._core")]
pub(crate) struct SchedulerStats {
    num_waiting: usize,
    num_running: usize,
    num_paused: usize,
    num_requests: usize,
    num_scopes: usize,
    blocks_total: usize,
    blocks_free: usize,
    blocks_cached: usize,
    blocks_active: usize,
    tokens_held: usize,
    steps: u64,
    preemptions: u64,
    recomputed_tokens: u64,
    swapped_out_blocks: u64,
    swapped_in_blocks: u64,
    host_blocks_total: usize,
    host_blocks_free: usize,
    prefix_queried_tokens: u64,
    prefix_hit_tokens: u64,
    partial_hit_tokens: u64,
    draft_tokens: u64,
    accepted_draft_tokens: u64,
    missed_never_seen: usize,
    missed_evicted: usize,
    missed_other_scope: usize,
    missed_in_flight: usize,
    missed_cap: usize,
    forgotten_keys: u64,
    evictions: u64,
    num_sessions: usize,
    pinned_blocks: usize,
    state_slots_total: usize,
    state_slots_free: usize,
    state_slots_working: usize,
    state_checkpoints: usize,
    state_checkpoint_evictions: u64,
    peak_blocks_active: usize,
    peak_tokens_held: usize,
    peak_table_blocks: usize,
    peak_table_tokens: usize,
    peak_num_sequences: usize,
    peak_num_running: usize,
}

impl Plan {
    pub(crate) fn new(plan: CorePlan, scheduler: u64, buffers: Py<StepBuffers>) -> Self {
        Self {
            id: plan.id,
            num_tokens: plan.num_tokens,
            num_batch_rows: plan.num_batch_rows,
            num_decodes: plan.num_decodes,
            num_draft_rows: plan.num_draft_rows,
            num_samples: plan.num_samples,
            num_swap_outs: plan.num_swap_outs,
            num_swap_ins: plan.num_swap_ins,
            num_copies: plan.num_copies,
            num_state_restores: plan.num_state_restores,
            num_state_saves: plan.num_state_saves,
            num_placed: plan.num_placed,
            scheduler,
            buffers,
        }
    }
}

impl RequestSummary {
    pub(crate) fn new(summary: CoreSummary) -> Self {
        Self {
            request: summary.request.get(),
            prompt_tokens: summary.prompt_tokens,
            cached_tokens: summary.cached_tokens,
            partial_hit_tokens: summary.partial_hit_tokens,
            missed_never_seen: summary.misses.never_seen,
            missed_evicted: summary.misses.evicted,
            missed_other_scope: summary.misses.other_scope,
            missed_in_flight: summary.misses.in_flight,
            missed_cap: summary.misses.cap,
            output_tokens: summary.output_tokens,
            preemptions: summary.preemptions,
            recomputed_tokens: summary.recomputed_tokens,
            swapped_blocks: summary.swapped_blocks,
            stalled_seconds: summary.stalled_seconds,
            expired: summary.expired,
            aborted: summary.aborted,
            failed: summary.failed,
        }
    }
}

impl SchedulerStats {
    pub(crate) fn new(stats: CoreStats) -> Self {
        Self {
            num_waiting: stats.num_waiting,
            num_running: stats.num_running,
            num_paused: stats.num_paused,
            num_requests: stats.num_requests,
            num_scopes: stats.num_scopes,
            blocks_total: stats.blocks.total,
            blocks_free: stats.blocks.free,
            blocks_cached: stats.blocks.cached,
            blocks_active: stats.blocks.active,
            tokens_held: stats.held_tokens,
            steps: stats.steps,
            preemptions: stats.preemptions,
            recomputed_tokens: stats.recomputed_tokens,
            swapped_out_blocks: stats.swapped_out_blocks,
            swapped_in_blocks: stats.swapped_in_blocks,
            host_blocks_total: stats.host_blocks_total,
            host_blocks_free: stats.host_blocks_free,
            prefix_queried_tokens: stats.queried_tokens,
            prefix_hit_tokens: stats.hit_tokens,
            partial_hit_tokens: stats.partial_hit_tokens,
            draft_tokens: stats.draft_tokens,
            accepted_draft_tokens: stats.accepted_draft_tokens,
            missed_never_seen: stats.misses.never_seen,
            missed_evicted: stats.misses.evicted,
            missed_other_scope: stats.misses.other_scope,
            missed_in_flight: stats.misses.in_flight,
            missed_cap: stats.misses.cap,
            forgotten_keys: stats.forgotten_keys,
            evictions: stats.evictions,
            num_sessions: stats.num_sessions,
            pinned_blocks: stats.pinned_blocks,
            state_slots_total: stats.state_slots.total,
            state_slots_free: stats.state_slots.free,
            state_slots_working: stats.state_slots.working,
            state_checkpoints: stats.state_slots.checkpoints,
            state_checkpoint_evictions: stats.checkpoint_evictions,
            peak_blocks_active: stats.peak.active_blocks,
            peak_tokens_held: stats.peak.held_tokens,
            peak_table_blocks: stats.peak.unshared_blocks,
            peak_table_tokens: stats.peak.unshared_tokens,
            peak_num_sequences: stats.peak.num_sequences,
            peak_num_running: stats.peak_num_running,
        }
    }
}
