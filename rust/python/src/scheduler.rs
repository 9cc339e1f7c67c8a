//! `pykv._core.Scheduler`: one lock around the core's scheduler.

use std::sync::atomic::{AtomicU64, Ordering};

use pykv_core::policy::preemption::Costs;
use pykv_core::prefix::{Media, PinId, Retention};
use pykv_core::recording::RecordedScheduler;
use pykv_core::scheduler::{FinishReason, Outcome, Proposal, Sampled, Submission};
use pykv_core::{Error, RequestId, TokenId};
use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::blocks::convert_tokens as convert_token_ids;
use crate::convert::{buffer, cells, convert, convert_places, convert_tokens, needed, read, wrong};
use crate::errors::exception;
use crate::events::{KvEvents, kv_events};
use crate::guard::{Guarded, caught};
use crate::options::Options;
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
    fn new(config: Options, hash_seed: u64) -> PyResult<Self> {
        let config = config.config(hash_seed).map_err(|error| exception(&error))?;
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

    fn num_cached_tokens(&self, py: Python<'_>, request: u64) -> PyResult<Option<usize>> {
        self.inner.call(py, |inner| Ok(inner.core.scheduler().num_cached_tokens(RequestId::new(request))))
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
        self.inner.call(py, |inner| inner.core.set_costs(Costs { seconds_per_token, seconds_per_block }))
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
    module.add_function(wrap_pyfunction!(_panic, module)?)
}
