//! `pykv._core.replay_recording`.

use pykv_core::recording::{self, Ending};
use pyo3::prelude::*;

use crate::errors::RecordingError;
use crate::guard::caught;

/// Makes the calls of a recording again: how many there were, how many of them planned a step, and whether it is cut.
#[pyfunction]
fn replay_recording(py: Python<'_>, bytes: &[u8], allow_cut: bool) -> PyResult<(u64, u64, bool)> {
    let ending = if allow_cut { Ending::MayBeCut } else { Ending::Complete };
    let replayed = py.detach(|| caught(|| recording::replay(bytes, ending)))?;
    let replayed = replayed.map_err(|error| RecordingError::new_err(error.to_string()))?;
    Ok((replayed.num_calls, replayed.num_plans, replayed.is_cut))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(replay_recording, module)?)
}
