//! The compiled module `pykv._core`: convert, call, convert back.

mod attention;
mod blocks;
mod content_keys;
mod convert;
mod errors;
mod events;
mod guard;
mod options;
mod recording;
mod replay;
mod reports;
mod scheduler;
mod step_buffers;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    attention::register(module)?;
    blocks::register(module)?;
    content_keys::register(module)?;
    options::register(module)?;
    recording::register(module)?;
    replay::register(module)?;
    scheduler::register(module)
}
