//! Core errors as the exceptions of `pykv.errors`, in one exhaustive match.

use pykv_core::Error;
use pyo3::exceptions::PyMemoryError;
use pyo3::import_exception;
use pyo3::prelude::*;

import_exception!(pykv.errors, CapacityError);
import_exception!(pykv.errors, ConfigError);
import_exception!(pykv.errors, InvalidRequestError);
import_exception!(pykv.errors, OutOfBlocksError);
import_exception!(pykv.errors, PinQuotaError);
import_exception!(pykv.errors, PoisonedError);
import_exception!(pykv.errors, QueueFullError);
import_exception!(pykv.errors, RecordingError);
import_exception!(pykv.errors, StepError);
import_exception!(pykv.errors, TraceError);

/// The exception for a core error.
pub(crate) fn exception(error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::OutOfMemory { .. } => PyMemoryError::new_err(message),
        Error::InvalidConfig { .. } => ConfigError::new_err(message),
        Error::InvalidRequest { field, .. } => InvalidRequestError::new_err((message, *field)),
        Error::NeverFits { .. } => CapacityError::new_err((message, "prompt")),
        Error::QueueFull { .. } => QueueFullError::new_err(message),
        Error::PinQuota { .. } => PinQuotaError::new_err(message),
        Error::OutOfBlocks { .. } => OutOfBlocksError::new_err(message),
        Error::StepInFlight { .. }
        | Error::ArraysInFlight { .. }
        | Error::OutOfOrder { .. }
        | Error::NotInFlight { .. }
        | Error::ArrayLength { .. }
        | Error::ArrayValue { .. } => StepError::new_err(message),
        Error::Broken { .. } => PoisonedError::new_err(message),
    }
}
