//! Buffers of Python as cells of Rust, and their values checked one by one.

use std::cell::Cell;

use pyo3::buffer::{Element, PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;

use crate::errors::StepError;

/// An array that is written: contiguous and not read-only.
pub(crate) fn cells<'py, T: Element>(
    py: Python<'py>,
    buffer: &'py PyBuffer<T>,
    array: &str,
) -> PyResult<&'py [Cell<T>]> {
    buffer
        .as_mut_slice(py)
        .ok_or_else(|| StepError::new_err(format!("{array} must be C-contiguous and writable")))
}

/// An array that is read: contiguous.
pub(crate) fn read<'py, T: Element>(
    py: Python<'py>,
    buffer: &'py PyBuffer<T>,
    array: &str,
) -> PyResult<&'py [ReadOnlyCell<T>]> {
    buffer.as_slice(py).ok_or_else(|| StepError::new_err(format!("{array} must be C-contiguous")))
}

/// Fills a vector with converted values, up to the first that cannot be.
pub(crate) fn convert<T: Copy + Element, U>(
    target: &mut Vec<U>,
    source: &[ReadOnlyCell<T>],
    convert: impl Fn(usize, T) -> pykv_core::Result<U>,
) -> pykv_core::Result<()> {
    target.clear();
    for (index, cell) in source.iter().enumerate() {
        target.push(convert(index, cell.get())?);
    }
    Ok(())
}
