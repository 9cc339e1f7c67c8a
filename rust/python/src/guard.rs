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

    /// As `call`, of an object that may have failed: for what it had done before.
    pub(crate) fn salvage<R>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.state.lock_py_attached(py).unwrap_or_else(|broken| broken.into_inner()).object)
    }

    /// Calls this object and another one together, which is locked second. A failure poisons both.
    pub(crate) fn call_with<U: Send, R>(
        &self,
        py: Python<'_>,
        other: &Guarded<U>,
        work: impl FnOnce(&mut T, &mut U) -> Result<R>,
    ) -> PyResult<R> {
        let mut first = self.state.lock_py_attached(py).unwrap_or_else(|broken| broken.into_inner());
        let mut second = other.state.lock_py_attached(py).unwrap_or_else(|broken| broken.into_inner());
        first.refuse_if_poisoned()?;
        second.refuse_if_poisoned()?;
        let (State { object, .. }, State { object: other, .. }) = (&mut *first, &mut *second);
        catch(|| work(object, other)).map_err(|error| {
            first.poison_by(&error);
            second.poison_by(&error);
            exception(&error)
        })
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

/// Calls what has no object of its own to poison.
pub(crate) fn caught<R>(work: impl FnOnce() -> R) -> PyResult<R> {
    catch(|| Ok(work())).map_err(|error| exception(&error))
}

fn catch<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

fn guarded<T, R>(mut state: MutexGuard<'_, State<T>>, work: impl FnOnce(&mut T) -> Result<R>) -> PyResult<R> {
    state.refuse_if_poisoned()?;
    let object = &mut state.object;
    catch(|| work(object)).map_err(|error| {
        state.poison_by(&error);
        exception(&error)
    })
}

impl<T> State<T> {
    fn refuse_if_poisoned(&self) -> PyResult<()> {
        self.poison.as_ref().map_or(Ok(()), |poison| Err(PoisonedError::new_err(poison.clone())))
    }

    fn poison_by(&mut self, error: &Error) {
        if matches!(error, Error::Broken { .. }) {
            self.poison = Some(format!("refused after an earlier failure: {error}"));
        }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::broken("no panic", text.unwrap_or("the core panicked"))
}
