//! `pykv._core.Scheduler`: one lock around the core's scheduler.

use pykv_core::policy::order::QueueOrder;
use pykv_core::policy::preemption::{Costs, PreemptionMode};
use pykv_core::prefix::content_key;
use pykv_core::prefix::eviction::eviction_policy;
use pykv_core::prefix::{Events, Media, PinId, PinQuota, Retention};
use pykv_core::recording::{self, Ending, RecordedScheduler};
use pykv_core::scheduler::{AdmissionPolicy, FinishReason, Outcome, Proposal, Sampled, Submission};
use pykv_core::{BlockSize, Error, LayerGroup, MAX_TOKEN_ID, RequestId, SchedulerConfig, TokenId};
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::blocks::convert_tokens as convert_token_ids;
use crate::convert::{buffer, cells, convert, read};
use crate::errors::{RecordingError, exception};
use crate::guard::{Guarded, caught};
use crate::reports::{Plan, RequestSummary, SchedulerStats};
use crate::step_buffers::StepBuffers;

/// What a call converts its arrays into; kept, so that steps allocate nothing.
#[derive(Default)]
struct Scratch {
    tokens: Vec<TokenId>,
    outcomes: Vec<Outcome>,
    failed_rows: Vec<usize>,
    accepted: Vec<usize>,
    rows: Vec<usize>,
    starts: Vec<usize>,
}

struct Inner {
    core: RecordedScheduler,
    scratch: Scratch,
}

/// Layer groups by their windows; 0: all positions.
fn groups(windows: &[usize]) -> Vec<LayerGroup> {
    let group = |&tokens: &usize| if tokens == 0 { LayerGroup::Full } else { LayerGroup::Window { tokens } };
    windows.iter().map(group).collect()
}

/// The most tokens that one sequence can ever have.
#[pyfunction]
#[pyo3(signature = (*, num_blocks, block_size, windows, max_num_batched_tokens, max_chunk_tokens, max_model_len))]
fn max_seq_len(
    num_blocks: usize,
    block_size: usize,
    windows: Vec<usize>,
    max_num_batched_tokens: usize,
    max_chunk_tokens: usize,
    max_model_len: usize,
) -> usize {
    let groups = groups(&windows);
    let options = SchedulerConfig {
        num_blocks,
        block_size,
        groups,
        max_num_batched_tokens,
        max_chunk_tokens,
        max_model_len,
        ..SchedulerConfig::default()
    };
    options.cap()
}

/// The most blocks that a sequence of so many tokens holds at once over all groups.
#[pyfunction]
#[pyo3(signature = (num_tokens, *, block_size, windows, chunk))]
fn most_blocks(num_tokens: usize, block_size: usize, windows: Vec<usize>, chunk: usize) -> PyResult<usize> {
    let size = BlockSize::new(block_size).map_err(|error| exception(&error))?;
    Ok(pykv_core::groups::most_blocks(&groups(&windows), num_tokens, chunk, size))
}

#[pyclass(frozen, module = "pykv._core")]
struct Scheduler {
    inner: Guarded<Inner>,
    number: u64,
}

/// Numbers schedulers, so that a plan of one is not taken for another's.
static NEXT_SCHEDULER: AtomicU64 = AtomicU64::new(0);

impl Scheduler {
    fn check_own(&self, plan: &Plan) -> pykv_core::Result<()> {
        if plan.scheduler == self.number { Ok(()) } else { Err(Error::NotInFlight { plan: plan.id }) }
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "one argument an option, named at the only call")]
    #[pyo3(signature = (*, num_blocks, num_host_blocks, preemption, block_size, windows, max_num_seqs, max_num_batched_tokens, max_chunk_tokens,
        num_lookahead_tokens, max_model_len, max_steps_in_flight, watermark, admission, queue_order, max_passes, preempt_lower_ranks, enable_prefix_caching,
        eviction, tenant_cache_share, max_pinned_blocks, max_pinned_blocks_per_tenant, max_kv_events, report_other_scopes, num_state_slots, checkpoint_every, partial_block_reuse, max_queued_requests, max_queued_tokens, hash_seed))]
    fn new(
        num_blocks: usize,
        num_host_blocks: usize,
        preemption: &str,
        block_size: usize,
        windows: Vec<usize>,
        max_num_seqs: usize,
        max_num_batched_tokens: usize,
        max_chunk_tokens: usize,
        num_lookahead_tokens: usize,
        max_model_len: usize,
        max_steps_in_flight: usize,
        watermark: f64,
        admission: &str,
        queue_order: &str,
        max_passes: usize,
        preempt_lower_ranks: bool,
        enable_prefix_caching: bool,
        eviction: &str,
        tenant_cache_share: f64,
        max_pinned_blocks: usize,
        max_pinned_blocks_per_tenant: usize,
        max_kv_events: usize,
        report_other_scopes: bool,
        num_state_slots: usize,
        checkpoint_every: usize,
        partial_block_reuse: usize,
        max_queued_requests: usize,
        max_queued_tokens: usize,
        hash_seed: u64,
    ) -> PyResult<Self> {
        let config = SchedulerConfig {
            num_blocks,
            num_host_blocks,
            preemption: PreemptionMode::from_name(preemption).map_err(|error| exception(&error))?,
            block_size,
            groups: groups(&windows),
            max_num_seqs,
            max_num_batched_tokens,
            max_chunk_tokens,
            num_lookahead_tokens,
            max_model_len,
            max_steps_in_flight,
            watermark,
            admission: AdmissionPolicy::from_name(admission).map_err(|error| exception(&error))?,
            enable_prefix_caching,
            eviction: eviction_policy(eviction).map_err(|error| exception(&error))?,
            tenant_cache_share,
            max_kv_events,
            report_other_scopes,
            num_state_slots,
            checkpoint_every,
            partial_block_reuse,
            pin_quota: PinQuota {
                blocks: max_pinned_blocks,
                blocks_per_tenant: max_pinned_blocks_per_tenant,
            },
            queue_order: QueueOrder::from_name(queue_order).map_err(|error| exception(&error))?,
            max_passes,
            preempt_lower_ranks,
            max_queued_requests,
            max_queued_tokens,
            hash_seed,
            hash_mask: u64::MAX,
        };
        let core = RecordedScheduler::new(config).map_err(|error| exception(&error))?;
        let number = NEXT_SCHEDULER.fetch_add(1, Ordering::Relaxed);
        Ok(Self { inner: Guarded::new(Inner { core, scratch: Scratch::default() }), number })
    }

    #[expect(clippy::too_many_arguments, reason = "one argument a field, named at the only call")]
    #[pyo3(signature = (prompt, *, max_tokens, num_samples, scope, reuse_cached, tenant, priority, deadline, session, ttl, next_turn,
        retention_priority, media))]
    fn submit(
        &self,
        py: Python<'_>,
        prompt: PyBuffer<i32>,
        max_tokens: Option<usize>,
        num_samples: usize,
        scope: &[u8],
        reuse_cached: bool,
        tenant: &[u8],
        priority: i32,
        deadline: Option<f64>,
        session: Option<&[u8]>,
        ttl: Option<f64>,
        next_turn: Option<f64>,
        retention_priority: i8,
        media: Vec<(usize, PyBackedBytes)>,
    ) -> PyResult<u64> {
        let prompt = read(py, &prompt, "prompt")?;
        let media: Vec<Media<'_>> =
            media.iter().map(|(offset, hash)| Media { offset: *offset, hash: hash.as_ref() }).collect();
        self.inner.call(py, |inner| {
            let tokens = &mut inner.scratch.tokens;
            let is_none = |index, token: i32| {
                let value = format!("{token} at position {index}");
                Error::request("prompt", value, "token ids of at least 0")
            };
            convert(tokens, prompt, |token| TokenId::try_from(token).ok(), is_none)?;
            let prompt = tokens.as_slice();
            let submission = Submission {
                prompt,
                max_tokens,
                num_samples,
                scope,
                reuse_cached,
                tenant,
                priority,
                deadline,
                retention: Retention { session, ttl, next_turn, priority: retention_priority, tenant },
                media: &media,
            };
            let request = inner.core.submit(submission)?;
            Ok(request.get())
        })
    }

    fn cached_tokens(&self, py: Python<'_>, tokens: PyBuffer<i32>, scope: &[u8]) -> PyResult<usize> {
        let tokens = read(py, &tokens, "tokens")?;
        self.inner.call(py, |inner| {
            convert_token_ids(&mut inner.scratch.tokens, tokens)?;
            Ok(inner.core.scheduler().cached_tokens(&inner.scratch.tokens, scope))
        })
    }

    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<KvEvents<'py>> {
        let events = self.inner.call(py, |inner| Ok(inner.core.scheduler().take_events()))?;
        Ok(kv_events(py, &events))
    }

    fn snapshot_events<'py>(&self, py: Python<'py>) -> PyResult<KvEvents<'py>> {
        let events = self.inner.call_detached(py, |inner| Ok(inner.core.scheduler().snapshot_events()))?;
        Ok(kv_events(py, &events))
    }

    fn end_session(&self, py: Python<'_>, session: &[u8], tenant: &[u8]) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.end_session(tenant, session)))
    }

    /// (number, tokens, blocks) of the pin, if anything is cached.
    fn pin(
        &self,
        py: Python<'_>,
        tokens: PyBuffer<i32>,
        scope: &[u8],
        tenant: &[u8],
    ) -> PyResult<Option<(u64, usize, usize)>> {
        let tokens = read(py, &tokens, "tokens")?;
        let pinned = self.inner.call(py, |inner| {
            convert_token_ids(&mut inner.scratch.tokens, tokens)?;
            inner.core.pin(&inner.scratch.tokens, scope, tenant)
        })?;
        Ok(pinned.map(|pinned| (pinned.pin.get(), pinned.num_tokens, pinned.num_blocks)))
    }

    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.unpin(PinId::new(pin))))
    }

    fn set_cache_share(&self, py: Python<'_>, tenant: &[u8], share: f64) -> PyResult<()> {
        self.inner.call(py, |inner| inner.core.set_cache_share(tenant, share))
    }

    fn abort(&self, py: Python<'_>, request: u64) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.abort(RequestId::new(request))))
    }

    fn pause(&self, py: Python<'_>, request: u64) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.pause(RequestId::new(request))))
    }

    fn resume(&self, py: Python<'_>, request: u64) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.resume(RequestId::new(request))))
    }

    fn plan(&self, py: Python<'_>, buffers: &Bound<'_, StepBuffers>, now: f64) -> PyResult<Option<Plan>> {
        let owner = buffers.get();
        let arrays = owner.arrays(py)?;
        let plan = self.inner.call(py, |inner| {
            let mut sync = owner.sync.lock().unwrap_or_else(|broken| broken.into_inner());
            inner.core.plan(&arrays, &mut sync, now)
        })?;
        Ok(plan.map(|plan| Plan::new(plan, self.number, buffers.clone().unbind())))
    }

    fn propose(
        &self,
        py: Python<'_>,
        rows: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (rows, starts) = (buffer::<i32>(rows, "rows")?, buffer::<i32>(starts, "starts")?);
        let tokens = buffer::<i64>(tokens, "tokens")?;
        let (rows, starts) = (read(py, &rows, "rows")?, read(py, &starts, "starts")?);
        let tokens = read(py, &tokens, "tokens")?;
        self.inner.call(py, |inner| {
            let scratch = &mut inner.scratch;
            convert_places(&mut scratch.rows, rows, "rows", "a row of the block tables")?;
            convert_places(&mut scratch.starts, starts, "starts", "a place in tokens")?;
            convert_tokens(&mut scratch.tokens, tokens, "tokens")?;
            let Scratch { rows, starts, tokens, .. } = scratch;
            inner.core.propose(Proposal { rows, starts, tokens })
        })
    }

    #[pyo3(signature = (plan, sampled, outcomes, failed_rows=None, accepted=None))]
    fn apply(
        &self,
        py: Python<'_>,
        plan: &Plan,
        sampled: &Bound<'_, PyAny>,
        outcomes: &Bound<'_, PyAny>,
        failed_rows: Option<&Bound<'_, PyAny>>,
        accepted: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<RequestSummary>> {
        let sampled = buffer::<i64>(sampled, "sampled")?;
        let outcomes = buffer::<u8>(outcomes, "outcomes")?;
        let failed_rows = failed_rows.map(|rows| buffer::<i32>(rows, "failed_rows")).transpose()?;
        let accepted = accepted.map(|counts| buffer::<i32>(counts, "accepted")).transpose()?;
        let sampled = read(py, &sampled, "sampled")?;
        let outcomes = read(py, &outcomes, "outcomes")?;
        let failed_rows = failed_rows.as_ref().map(|rows| read(py, rows, "failed_rows")).transpose()?;
        let accepted = accepted.as_ref().map(|counts| read(py, counts, "accepted")).transpose()?;
        let reasons = cells(py, &plan.buffers.get().finish_reasons, "finish_reasons")?;
        let ended = self.inner.call(py, |inner| {
            self.check_own(plan)?;
            inner.scratch.fill(
                sampled,
                outcomes,
                failed_rows.unwrap_or_default(),
                accepted.unwrap_or_default(),
            )?;
            let Scratch { tokens, outcomes, failed_rows, .. } = &inner.scratch;
            needed("finish_reasons", reasons.len(), tokens.len())?;
            let accepted = accepted.map(|_| inner.scratch.accepted.as_slice());
            let sampled = Sampled { tokens, outcomes, failed_rows, accepted };
            inner
                .core
                .apply(plan.id, sampled, |sample, reason: FinishReason| reasons[sample].set(reason as u8))
        })?;
        Ok(ended.into_iter().map(RequestSummary::new).collect())
    }

    fn discard(&self, py: Python<'_>, plan: &Plan) -> PyResult<()> {
        self.inner.call(py, |inner| {
            self.check_own(plan)?;
            inner.core.discard(plan.id)
        })
    }

    #[pyo3(signature = (*, seconds_per_token, seconds_per_block))]
    fn set_costs(&self, py: Python<'_>, seconds_per_token: f64, seconds_per_block: f64) -> PyResult<()> {
        self.inner.call(py, |inner| {
            inner.core.set_costs(Costs { seconds_per_token, seconds_per_block });
            Ok(())
        })
    }

    fn start_recording(&self, py: Python<'_>) -> PyResult<bool> {
        self.inner.call(py, |inner| Ok(inner.core.start_recording()))
    }

    fn take_recording(&self, py: Python<'_>, at_least: usize) -> Option<Vec<u8>> {
        self.inner.salvage(py, |inner| {
            (inner.core.recording_len() >= at_least).then(|| inner.core.take_recording())
        })
    }

    fn finish_recording(&self, py: Python<'_>) -> Vec<u8> {
        self.inner.salvage(py, |inner| inner.core.finish_recording())
    }

    fn stop_recording(&self, py: Python<'_>) {
        self.inner.salvage(py, |inner| inner.core.stop_recording());
    }

    fn take_ended(&self, py: Python<'_>) -> PyResult<Vec<RequestSummary>> {
        let ended = self.inner.call(py, |inner| Ok(inner.core.take_ended()))?;
        Ok(ended.into_iter().map(RequestSummary::new).collect())
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.call_detached(py, |inner| {
            inner.core.reset_prefix_cache();
            Ok(())
        })
    }

    fn stats(&self, py: Python<'_>) -> PyResult<SchedulerStats> {
        self.inner.call(py, |inner| Ok(SchedulerStats::new(inner.core.scheduler().stats())))
    }

    /// Panics inside the lock, so that a test can see what comes after.
    fn _panic(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.call(py, |_| panic!("asked to panic"))
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.call_detached(py, |inner| inner.core.scheduler().check())
    }
}

impl Scratch {
    fn fill(
        &mut self,
        sampled: &[ReadOnlyCell<i64>],
        outcomes: &[ReadOnlyCell<u8>],
        failed_rows: &[ReadOnlyCell<i32>],
        accepted: &[ReadOnlyCell<i32>],
    ) -> pykv_core::Result<()> {
        convert_tokens(&mut self.tokens, sampled, "sampled")?;
        let is_none = |index, value: u8| wrong("outcomes", index, value.into(), "0, 1 or 2");
        convert(&mut self.outcomes, outcomes, Outcome::from_number, is_none)?;
        convert_places(&mut self.failed_rows, failed_rows, "failed_rows", "a batch row of the plan")?;
        convert_places(&mut self.accepted, accepted, "accepted", "at least 0")
    }
}

fn convert_tokens(
    target: &mut Vec<TokenId>,
    tokens: &[ReadOnlyCell<i64>],
    array: &'static str,
) -> pykv_core::Result<()> {
    let is_none = |index, value| wrong(array, index, value, "a token id from 0 to 2147483647");
    let token_id = |value| TokenId::try_from(value).ok().filter(|&token| token <= MAX_TOKEN_ID);
    convert(target, tokens, token_id, is_none)
}

fn convert_places(
    target: &mut Vec<usize>,
    values: &[ReadOnlyCell<i32>],
    array: &'static str,
    allowed: &'static str,
) -> pykv_core::Result<()> {
    let is_none = |index, value: i32| wrong(array, index, value.into(), allowed);
    convert(target, values, |value| usize::try_from(value).ok(), is_none)
}

fn wrong(array: &'static str, index: usize, value: i64, allowed: &'static str) -> Error {
    Error::ArrayValue { array, index, value, allowed }
}

fn needed(array: &'static str, length: usize, needed: usize) -> pykv_core::Result<()> {
    if length < needed { Err(Error::ArrayLength { array, length, needed }) } else { Ok(()) }
}

/// (sequence, dropped, kinds, keys, parents, is_first, tokens), the arrays as bytes.
type KvEvents<'py> = (
    u64,
    u64,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
);

fn kv_events<'py>(py: Python<'py>, events: &Events) -> KvEvents<'py> {
    let tokens: Vec<u8> = events.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
    (
        events.sequence,
        events.dropped,
        PyBytes::new(py, &events.kinds),
        PyBytes::new(py, events.keys.as_flattened()),
        PyBytes::new(py, events.parents.as_flattened()),
        PyBytes::new(py, &events.is_first),
        PyBytes::new(py, &tokens),
    )
}

/// The content keys of a prompt's full blocks, 32 bytes each, behind the scope's root key.
#[pyfunction]
fn content_keys<'py>(
    py: Python<'py>,
    tokens: PyBuffer<i32>,
    block_size: usize,
    scope: &[u8],
    media: Vec<(usize, PyBackedBytes)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let size = BlockSize::new(block_size).map_err(|error| exception(&error))?;
    let media: Vec<Media<'_>> =
        media.iter().map(|(offset, hash)| Media { offset: *offset, hash: hash.as_ref() }).collect();
    let mut converted = Vec::new();
    convert_token_ids(&mut converted, read(py, &tokens, "tokens")?).map_err(|error| exception(&error))?;
    Media::check(&media, converted.len()).map_err(|error| exception(&error))?;
    let mut keys = vec![content_key::root_key(size, scope)];
    keys.extend(content_key::content_keys(size, scope, &converted, &media));
    Ok(PyBytes::new(py, keys.as_flattened()))
}

/// Makes the calls of a recording again: how many there were, how many of them planned a step, and whether it is cut.
#[pyfunction]
fn replay_recording(py: Python<'_>, bytes: &[u8], allow_cut: bool) -> PyResult<(u64, u64, bool)> {
    let ending = if allow_cut { Ending::MayBeCut } else { Ending::Complete };
    let replayed = py.detach(|| caught(|| recording::replay(bytes, ending)))?;
    let replayed = replayed.map_err(|error| RecordingError::new_err(error.to_string()))?;
    Ok((replayed.num_calls, replayed.num_plans, replayed.is_cut))
}

/// Panics where the functions of this module run, so that a test can see what comes of it.
#[pyfunction]
fn _panic() -> PyResult<()> {
    caught(|| panic!("asked to panic"))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<StepBuffers>()?;
    module.add_class::<Plan>()?;
    module.add_class::<RequestSummary>()?;
    module.add_class::<SchedulerStats>()?;
    module.add_class::<Scheduler>()?;
    module.add_function(wrap_pyfunction!(content_keys, module)?)?;
    module.add_function(wrap_pyfunction!(max_seq_len, module)?)?;
    module.add_function(wrap_pyfunction!(most_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_panic, module)?)?;
    module.add_function(wrap_pyfunction!(replay_recording, module)?)
}
