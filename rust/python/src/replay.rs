//! `pykv._core.Trace` and what is replayed of it.

use pykv_replay::serial::{self, Hits, Policy, Ranking, Use};
use pykv_replay::trace::Columns;
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{TraceError, exception};

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
        Ok(Self { core: core.map_err(|refused| TraceError::new_err((refused.to_string(), refused.request)))? })
    }

    #[getter]
    fn num_requests(&self) -> usize {
        self.core.requests().len()
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
        let answer = self.rank.bind(self.py).call1((used.request, PyBytes::new(self.py, &bytes), used.found))?;
        ranks.extend(PyBuffer::<f64>::get(&answer)?.to_vec(self.py)?);
        Ok(())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Trace>()?;
    module.add_class::<CacheHits>()
}
