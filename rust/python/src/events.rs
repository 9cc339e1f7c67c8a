//! Events about cached blocks, as bytes of arrays.

use pykv_core::prefix::Events;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// (sequence, dropped, kinds, keys, parents, is_first, tokens), the arrays as bytes.
pub(crate) type KvEvents<'py> = (
    u64,
    u64,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
    Bound<'py, PyBytes>,
);

pub(crate) fn kv_events<'py>(py: Python<'py>, events: &Events) -> KvEvents<'py> {
    let tokens: Vec<u8> = events.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
    (
        events.sequence,
        events.dropped,
        PyBytes::new(py, &events.kinds),
        PyBytes::new(py, events.keys.as_flattened()),
        PyBytes::new(py, events.parents.as_flattened()),
        PyBytes::new(py, &events.is_first),
        PyBytes::new(py, &tokens),
    )
}
