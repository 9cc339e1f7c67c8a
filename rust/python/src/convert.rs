//! Buffers of Python as cells of Rust, and their values checked one by one.

use std::cell::Cell;

use pyo3::buffer::{Element, PyBuffer, ReadOnlyCell};
use pyo3::prelude::*;

use crate::errors::StepError;

/// What numpy calls an element.
pub(crate) trait Dtype: Element {
    const NAME: &'static str;
}

impl Dtype for i32 {
    const NAME: &'static str = "int32";
}

impl Dtype for i64 {
    const NAME: &'static str = "int64";
}

impl Dtype for u8 {
    const NAME: &'static str = "uint8";
}

/// The memory of an array that a step is given.
pub(crate) fn buffer<T: Dtype>(object: &Bound<'_, PyAny>, array: &str) -> PyResult<PyBuffer<T>> {
    let buffer = PyBuffer::get(object).map_err(|error| {
        let given =
            object.getattr("dtype").map_or_else(|_| object.get_type().to_string(), |dtype| dtype.to_string());
        StepError::new_err(format!("{array} is {given}: needed is an array of {} ({error})", T::NAME))
    })?;
    match buffer.dimensions() {
        1 => Ok(buffer),
        dimensions => Err(StepError::new_err(format!("{array} has {dimensions} dimensions: needed is one"))),
    }
}

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
