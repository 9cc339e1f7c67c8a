//! `pykv.SchedulerConfig` as the core takes it, and what can be told from it without a scheduler.

use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::PreemptionMode;
use pykv_core::prefix::PinQuota;
use pykv_core::prefix::eviction::eviction_policy;
use pykv_core::scheduler::AdmissionPolicy;
use pykv_core::{BlockSize, LayerGroup, Result as CoreResult, SchedulerConfig};
use pyo3::prelude::*;

use crate::errors::exception;

/// The options of `pykv.SchedulerConfig`, by name.
#[derive(FromPyObject)]
pub(crate) struct Options {
    num_blocks: usize,
    num_host_blocks: usize,
    preemption: String,
    block_size: usize,
    groups: Vec<Option<usize>>,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_chunk_tokens: Option<usize>,
    num_lookahead_tokens: usize,
    max_model_len: usize,
    max_steps_in_flight: usize,
    watermark: f64,
    admission: String,
    queue_order: String,
    max_passes: usize,
    preempt_lower_ranks: bool,
    enable_prefix_caching: bool,
    eviction: String,
    tenant_cache_share: f64,
    max_pinned_blocks: usize,
    max_pinned_blocks_per_tenant: Option<usize>,
    max_kv_events: usize,
    report_other_scopes: bool,
    num_state_slots: usize,
    checkpoint_every: usize,
    partial_block_reuse: usize,
    max_queued_requests: usize,
    max_queued_tokens: Option<usize>,
}

/// Tokens that may wait where there is no limit.
const NO_LIMIT: usize = 1 << 62;

impl Options {
    pub(crate) fn config(self, hash_seed: u64) -> CoreResult<SchedulerConfig> {
        Ok(SchedulerConfig {
            num_blocks: self.num_blocks,
            num_host_blocks: self.num_host_blocks,
            preemption: PreemptionMode::from_name(&self.preemption)?,
            block_size: self.block_size,
            groups: groups(self.groups),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_chunk_tokens: self.max_chunk_tokens.unwrap_or(self.max_num_batched_tokens),
            num_lookahead_tokens: self.num_lookahead_tokens,
            max_model_len: self.max_model_len,
            max_steps_in_flight: self.max_steps_in_flight,
            watermark: self.watermark,
            admission: AdmissionPolicy::from_name(&self.admission)?,
            enable_prefix_caching: self.enable_prefix_caching,
            eviction: eviction_policy(&self.eviction)?,
            tenant_cache_share: self.tenant_cache_share,
            pin_quota: PinQuota {
                blocks: self.max_pinned_blocks,
                blocks_per_tenant: self.max_pinned_blocks_per_tenant.unwrap_or(self.max_pinned_blocks),
            },
            max_kv_events: self.max_kv_events,
            report_other_scopes: self.report_other_scopes,
            num_state_slots: self.num_state_slots,
            checkpoint_every: self.checkpoint_every,
            partial_block_reuse: self.partial_block_reuse,
            queue_order: QueueOrder::from_name(&self.queue_order)?,
            max_passes: self.max_passes,
            preempt_lower_ranks: self.preempt_lower_ranks,
            max_queued_tokens: self.max_queued_tokens.unwrap_or(NO_LIMIT),
            max_queued_requests: self.max_queued_requests,
            hash_seed,
            hash_mask: u64::MAX,
        })
    }
}

/// Layer groups by their windows; none: all positions.
fn groups(windows: Vec<Option<usize>>) -> Vec<LayerGroup> {
    let group =
        |window: Option<usize>| window.map_or(LayerGroup::Full, |tokens| LayerGroup::Window { tokens });
    windows.into_iter().map(group).collect()
}

/// The options that are whole numbers, each with the least and the most that it may be, whatever the others are.
#[pyfunction]
fn option_ranges() -> Vec<(&'static str, usize, usize)> {
    SchedulerConfig::RANGES.to_vec()
}

/// Refuses options that no scheduler takes.
#[pyfunction]
fn check_options(config: Options) -> PyResult<()> {
    config.config(0).and_then(|config| config.validate()).map_err(|error| exception(&error))
}

/// The most tokens that one sequence can ever have.
#[pyfunction]
fn max_seq_len(config: Options) -> PyResult<usize> {
    config.config(0).map(|config| config.cap()).map_err(|error| exception(&error))
}

/// The most blocks that a sequence of so many tokens holds at once over all groups.
#[pyfunction]
#[pyo3(signature = (num_tokens, *, block_size, windows, chunk))]
fn most_blocks(num_tokens: usize, block_size: usize, windows: Vec<usize>, chunk: usize) -> PyResult<usize> {
    let size = BlockSize::new(block_size).map_err(|error| exception(&error))?;
    let windows = windows.into_iter().map(|window| (window > 0).then_some(window)).collect();
    Ok(pykv_core::groups::most_blocks(&groups(windows), num_tokens, chunk, size))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(option_ranges, module)?)?;
    module.add_function(wrap_pyfunction!(check_options, module)?)?;
    module.add_function(wrap_pyfunction!(max_seq_len, module)?)?;
    module.add_function(wrap_pyfunction!(most_blocks, module)?)
}
