//! One lock around a core object, which refuses all further work after a panic or a broken invariant.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

use pykv_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::errors::{PoisonedError, exception};

/// A core object, and why it must not be used any more.
pub(crate) struct Guarded<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    object: T,
    poison: Option<String>,
}

impl<T: Send> Guarded<T> {
    pub(crate) fn new(object: T) -> Self {
        Self { state: Mutex::new(State { object, poison: None }) }
    }

    /// Calls the object with the interpreter attached. Waits for the lock detached, so that no two threads can wait for
    /// each other's lock and interpreter.
    pub(crate) fn call<R>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> Result<R>) -> PyResult<R> {
        guarded(self.state.lock_py_attached(py).unwrap_or_else(|broken| broken.into_inner()), work)
    }

    /// Calls the object with the interpreter detached: for work that takes long.
    pub(crate) fn call_detached<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> Result<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| guarded(self.state.lock().unwrap_or_else(|broken| broken.into_inner()), work))
    }
}

fn guarded<T, R>(mut state: MutexGuard<'_, State<T>>, work: impl FnOnce(&mut T) -> Result<R>) -> PyResult<R> {
    if let Some(poison) = &state.poison {
        return Err(PoisonedError::new_err(poison.clone()));
    }
    let object = &mut state.object;
    let result =
        catch_unwind(AssertUnwindSafe(|| work(object))).unwrap_or_else(|panic| Err(panicked(&*panic)));
    result.map_err(|error| {
        if matches!(error, Error::Broken { .. }) {
            state.poison = Some(format!("refused after an earlier failure: {error}"));
        }
        exception(&error)
    })
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::broken("no panic", text.unwrap_or("the core panicked"))
}
