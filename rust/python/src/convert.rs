//! Buffers of Python as cells of Rust, and their values checked one by one.

use std::cell::Cell;
use std::ffi::CStr;

use pykv_core::{Error, MAX_TOKEN_ID, TokenId};
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
    let refused = |why: &str| {
        let given =
            object.getattr("dtype").map_or_else(|_| object.get_type().to_string(), |dtype| dtype.to_string());
        StepError::new_err(format!("{array} is {given}: needed is an array of {} ({why})", T::NAME))
    };
    let buffer: PyBuffer<T> = PyBuffer::get(object).map_err(|error| refused(&error.to_string()))?;
    if !is_native(buffer.format()) {
        return Err(refused("its bytes are in another order than this machine's"));
    }
    match buffer.dimensions() {
        1 => Ok(buffer),
        dimensions => Err(StepError::new_err(format!("{array} has {dimensions} dimensions: needed is one"))),
    }
}

/// Whether a buffer's numbers have the byte order of this machine.
fn is_native(format: &CStr) -> bool {
    let is_little = cfg!(target_endian = "little");
    match format.to_bytes() {
        [b'>' | b'!', ..] => !is_little,
        [b'<', ..] => is_little,
        _ => true,
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

/// Fills a vector with converted values. Of those that cannot be, the first one is `wrong`.
pub(crate) fn convert<T: Copy + Element, U: Default>(
    target: &mut Vec<U>,
    source: &[ReadOnlyCell<T>],
    convert: impl Fn(T) -> Option<U>,
    wrong: impl Fn(usize, T) -> Error,
) -> pykv_core::Result<()> {
    // Without an early end, many are converted at once.
    let mut are_right = true;
    target.clear();
    target.extend(source.iter().map(|cell| {
        let value = convert(cell.get());
        are_right &= value.is_some();
        value.unwrap_or_default()
    }));
    let is_wrong = |cell: &&ReadOnlyCell<T>| !are_right && convert(cell.get()).is_none();
    match source.iter().enumerate().find(|(_, cell)| is_wrong(cell)) {
        Some((index, cell)) => Err(wrong(index, cell.get())),
        None => Ok(()),
    }
}

/// Fills a vector with token ids of 64 bits.
pub(crate) fn convert_tokens(
    target: &mut Vec<TokenId>,
    tokens: &[ReadOnlyCell<i64>],
    array: &'static str,
) -> pykv_core::Result<()> {
    let is_none = |index, value| wrong(array, index, value, "a token id from 0 to 2147483647");
    let token_id = |value| TokenId::try_from(value).ok().filter(|&token| token <= MAX_TOKEN_ID);
    convert(target, tokens, token_id, is_none)
}

/// Fills a vector with numbers that count or name places.
pub(crate) fn convert_places(
    target: &mut Vec<usize>,
    values: &[ReadOnlyCell<i32>],
    array: &'static str,
    allowed: &'static str,
) -> pykv_core::Result<()> {
    let is_none = |index, value: i32| wrong(array, index, value.into(), allowed);
    convert(target, values, |value| usize::try_from(value).ok(), is_none)
}

pub(crate) fn wrong(array: &'static str, index: usize, value: i64, allowed: &'static str) -> Error {
    Error::ArrayValue { array, index, value, allowed }
}

/// Whether an array is long enough.
pub(crate) fn needed(array: &'static str, length: usize, needed: usize) -> pykv_core::Result<()> {
    if length < needed { Err(Error::ArrayLength { array, length, needed }) } else { Ok(()) }
}
