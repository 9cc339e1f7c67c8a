//! `pykv._core.content_keys`.

use pykv_core::BlockSize;
use pykv_core::prefix::{Media, content_key};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::blocks::convert_tokens;
use crate::convert::read;
use crate::errors::exception;

/// The content keys of a prompt's full blocks, 32 bytes each, behind the scope's root key.
#[pyfunction]
fn content_keys<'py>(
    py: Python<'py>,
    tokens: PyBuffer<i32>,
    block_size: usize,
    scope: &[u8],
    media: Vec<(usize, PyBackedBytes)>,
) -> PyResult<Bound<'py, PyBytes>> {
    let size = BlockSize::new(block_size).map_err(|error| exception(&error))?;
    let media: Vec<Media<'_>> =
        media.iter().map(|(offset, hash)| Media { offset: *offset, hash: hash.as_ref() }).collect();
    let mut converted = Vec::new();
    convert_tokens(&mut converted, read(py, &tokens, "tokens")?).map_err(|error| exception(&error))?;
    Media::check(&media, converted.len()).map_err(|error| exception(&error))?;
    let mut keys = vec![content_key::root_key(size, scope)];
    keys.extend(content_key::content_keys(size, scope, &converted, &media));
    Ok(PyBytes::new(py, keys.as_flattened()))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(content_keys, module)?)
}
