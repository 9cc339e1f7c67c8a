//! `pykv._core.Trace` and what is replayed of it.

use pykv_core::{Result as CoreResult, SchedulerConfig};
use pykv_replay::recorded::trace_of_recording;
use pykv_replay::serial::{self, Hits, Policy, Ranking, Use};
use pykv_replay::timed::{self, Allocator, Arrivals, Outcome, Point, Retention, Served, Told};
use pykv_replay::trace::Columns;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{TraceError, exception};
use crate::options::Options;

/// A trace that was checked.
#[pyclass(frozen, module = "pykv._core")]
struct Trace {
    core: pykv_replay::Trace,
}

/// What a cache has found of what was asked for.
#[pyclass(frozen, get_all, module = "pykv._core")]
struct CacheHits {
    blocks: u64,
    tokens: u64,
    queried_blocks: u64,
    queried_tokens: u64,
    evictions: u64,
}

impl From<Hits> for CacheHits {
    fn from(hits: Hits) -> Self {
        let Hits { blocks, tokens, queried_blocks, queried_tokens, evictions } = hits;
        Self { blocks, tokens, queried_blocks, queried_tokens, evictions }
    }
}

/// The options that a replay looks at; it has no drafts, pins, events, shares or second step in flight.
fn replayed(options: Options) -> CoreResult<SchedulerConfig> {
    let SchedulerConfig {
        num_lookahead_tokens,
        max_steps_in_flight,
        tenant_cache_share,
        pin_quota,
        max_kv_events,
        report_other_scopes,
        partial_block_reuse,
        ..
    } = SchedulerConfig::default();
    Ok(SchedulerConfig {
        num_lookahead_tokens,
        max_steps_in_flight,
        tenant_cache_share,
        pin_quota,
        max_kv_events,
        report_other_scopes,
        partial_block_reuse,
        ..options.config(0)?
    })
}

/// The fields of `pykv.CostModel`, by name.
#[derive(FromPyObject)]
struct CostModel {
    fixed: f64,
    per_sequence: f64,
    per_token: f64,
    per_pair: f64,
    weights: f64,
    experts: f64,
    expert_share: f64,
    per_context_token: f64,
    window: usize,
    per_window_pair: f64,
    per_window_token: f64,
    per_swapped_block: f64,
    overlaps: bool,
}

impl From<CostModel> for timed::CostModel {
    fn from(model: CostModel) -> Self {
        let CostModel {
            fixed,
            per_sequence,
            per_token,
            per_pair,
            weights,
            experts,
            expert_share,
            per_context_token,
            window,
            per_window_pair,
            per_window_token,
            per_swapped_block,
            overlaps,
        } = model;
        Self {
            fixed,
            per_sequence,
            per_token,
            per_pair,
            weights,
            experts,
            expert_share,
            per_context_token,
            window,
            per_window_pair,
            per_window_token,
            per_swapped_block,
            overlaps,
        }
    }
}

/// A timed replay that has ended: numbers, and columns by request and by point in time.
#[pyclass(frozen, module = "pykv._core")]
struct TimedReplay {
    core: Outcome,
}

#[pymethods]
impl TimedReplay {
    /// The totals by name.
    fn totals(&self) -> Vec<(&'static str, f64)> {
        self.core.totals().to_vec()
    }

    /// A column of the requests by name, in the order of the trace.
    fn request_column(&self, name: &str) -> PyResult<Vec<f64>> {
        let of = Served::column(name).map_err(|error| exception(&error))?;
        Ok(self.core.requests.iter().map(of).collect())
    }

    /// A column of the points in time by name.
    fn point_column(&self, name: &str) -> PyResult<Vec<f64>> {
        let of = Point::column(name).map_err(|error| exception(&error))?;
        Ok(self.core.points.iter().map(of).collect())
    }
}

#[pymethods]
impl Trace {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "one argument a column, named at the only call")]
    #[pyo3(signature = (*, block_size, arrivals, prompt_tokens, output_tokens, sessions, num_runs, run_starts, run_lengths))]
    fn new(
        py: Python<'_>,
        block_size: usize,
        arrivals: PyBuffer<f64>,
        prompt_tokens: PyBuffer<i64>,
        output_tokens: PyBuffer<i64>,
        sessions: PyBuffer<i64>,
        num_runs: PyBuffer<i64>,
        run_starts: PyBuffer<i64>,
        run_lengths: PyBuffer<i64>,
    ) -> PyResult<Self> {
        let columns = Columns {
            arrivals: &arrivals.to_vec(py)?,
            prompt_tokens: &prompt_tokens.to_vec(py)?,
            output_tokens: &output_tokens.to_vec(py)?,
            sessions: &sessions.to_vec(py)?,
            num_runs: &num_runs.to_vec(py)?,
            run_starts: &run_starts.to_vec(py)?,
            run_lengths: &run_lengths.to_vec(py)?,
        };
        let core = pykv_replay::Trace::from_columns(block_size, columns);
        Ok(Self {
            core: core.map_err(|refused| TraceError::new_err((refused.to_string(), refused.request)))?,
        })
    }

    /// The trace of a recording.
    #[staticmethod]
    fn from_recording(py: Python<'_>, bytes: &[u8]) -> PyResult<Self> {
        let core = py.detach(|| trace_of_recording(bytes));
        Ok(Self { core: core.map_err(|error| TraceError::new_err((error.to_string(), None::<usize>)))? })
    }

    #[getter]
    fn num_requests(&self) -> usize {
        self.core.requests().len()
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.core.block_size()
    }

    /// The tokens of each prompt and of each output, in the order of the trace.
    fn lengths(&self) -> (Vec<u32>, Vec<u32>) {
        self.core.requests().iter().map(|request| (request.prompt_tokens, request.output_tokens)).unzip()
    }

    #[getter]
    fn num_prompt_tokens(&self) -> usize {
        self.core.num_prompt_tokens()
    }

    #[getter]
    fn longest_request(&self) -> usize {
        self.core.longest_request()
    }

    /// The same trace in blocks of another size.
    fn with_block_size(&self, block_size: usize) -> PyResult<Self> {
        let core = self.core.with_block_size(block_size).map_err(|error| exception(&error))?;
        Ok(Self { core })
    }

    /// A replay in virtual time.
    #[pyo3(signature = (config, cost, *, allocator, knows_outputs, retention, speed, concurrency))]
    #[expect(clippy::too_many_arguments, reason = "one argument an option, named at the only call")]
    fn replay_timed(
        &self,
        py: Python<'_>,
        config: Options,
        cost: CostModel,
        allocator: &str,
        knows_outputs: bool,
        retention: &str,
        speed: f64,
        concurrency: Option<usize>,
    ) -> PyResult<TimedReplay> {
        let arrivals =
            concurrency.map_or(Arrivals::Trace { speed }, |concurrency| Arrivals::Closed { concurrency });
        let mut signal = Ok(());
        let core = py.detach(|| {
            let allocator = Allocator::from_name(allocator)?;
            let goes_on = || {
                signal = Python::attach(|py| py.check_signals());
                signal.is_ok()
            };
            let told = Told { outputs: knows_outputs, retention: Retention::from_name(retention)? };
            allocator.replay(&self.core, replayed(config)?, told, &cost.into(), arrivals, goes_on)
        });
        signal?;
        Ok(TimedReplay { core: core.map_err(|error| exception(&error))? })
    }

    /// Serial replay under a policy of this package.
    fn replay_serial(&self, py: Python<'_>, num_blocks: usize, policy: &str) -> PyResult<CacheHits> {
        let hits = py.detach(|| Policy::from_name(policy)?.replay(&self.core, num_blocks));
        hits.map(CacheHits::from).map_err(|error| exception(&error))
    }

    /// Serial replay that asks `rank(request, blocks, found)` for the ranks of each use.
    fn replay_ranked(&self, py: Python<'_>, num_blocks: usize, rank: Py<PyAny>) -> PyResult<CacheHits> {
        serial::ranked(&self.core, num_blocks, &mut Callback { py, rank }).map(CacheHits::from)
    }

    /// Serial replay on a cache that forgets nothing.
    fn replay_infinite(&self, py: Python<'_>) -> CacheHits {
        py.detach(|| serial::infinite(&self.core)).into()
    }
}

/// A ranking that Python makes.
struct Callback<'py> {
    py: Python<'py>,
    rank: Py<PyAny>,
}

impl Ranking for Callback<'_> {
    type Error = PyErr;

    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> PyResult<()> {
        let bytes = used.blocks.iter().flat_map(|block| block.to_ne_bytes()).collect::<Vec<u8>>();
        let answer =
            self.rank.bind(self.py).call1((used.request, PyBytes::new(self.py, &bytes), used.found))?;
        ranks.extend(PyBuffer::<f64>::get(&answer)?.to_vec(self.py)?);
        Ok(())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Trace>()?;
    module.add_class::<TimedReplay>()?;
    module.add_class::<CacheHits>()
}
