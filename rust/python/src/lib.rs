//! The compiled module `pykv._core`: convert, call, convert back.

mod attention;
mod scheduler;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    attention::register(module)?;
    scheduler::register(module)
}
