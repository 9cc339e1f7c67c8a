//! The compiled module `pykv._core`: convert, call, convert back.

mod attention;
mod blocks;
mod convert;
mod errors;
mod guard;
mod replay;
mod reports;
mod scheduler;
mod step_buffers;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    attention::register(module)?;
    blocks::register(module)?;
    replay::register(module)?;
    scheduler::register(module)
}
