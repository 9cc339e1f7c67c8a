"""The exceptions of pykv: each is defined here once; the compiled module imports them."""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ConfigError",
    "DuplicateRequestError",
    "EngineDeadError",
    "InvalidRequestError",
    "MissingExtraError",
    "ModelError",
    "OutOfBlocksError",
    "PinQuotaError",
    "PoisonedError",
    "PykvError",
    "QueueFullError",
    "RecordingError",
    "StepError",
    "TraceError",
    "UnsupportedModelError",
]


class PykvError(Exception):
    """The base of every error that pykv raises on purpose."""


class ConfigError(PykvError, ValueError):
    """An option is unknown or its value is not allowed; the message names the option, the value and what is allowed."""


class InvalidRequestError(PykvError, ValueError):
    """A request's field has a value that is not allowed; nothing was changed.

    Attributes:
        field: the name of the field, as the caller wrote it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(InvalidRequestError):
    """A request can never fit: it needs more tokens than the context cap or the pool can hold.

    Attributes:
        num_encoded_tokens: how many tokens its text had been encoded to in vain; 0 where its length was enough.
    """

    def __init__(self, message: str, field: str | None = None, *, num_encoded_tokens: int = 0) -> None:
        super().__init__(message, field)
        self.num_encoded_tokens = num_encoded_tokens


class QueueFullError(PykvError):
    """The waiting queue is at its limit; the request was not taken and may be tried again later.

    Attributes:
        retry_seconds: after so long, where a server said so.
    """

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DuplicateRequestError(PykvError, ValueError):
    """A live request has this id already; the new one was not taken."""


class OutOfBlocksError(PykvError, MemoryError):
    """The pool has fewer blocks to give than were asked for; none was taken."""


class PinQuotaError(PykvError):
    """A pin would hold more blocks than its tenant, or all tenants together, may pin; nothing was pinned."""


class RecordingError(PykvError, ValueError):
    """A recording cannot be made or replayed: it is malformed, or a call decides otherwise than it did."""


class TraceError(PykvError, ValueError):
    """A file of request traces or measurements cannot be read; the message names the file, the line and the field.

    Attributes:
        request: which request is refused, counted from 0; None: the fault is not in a request.
    """

    def __init__(self, message: str, request: int | None = None) -> None:
        super().__init__(message)
        self.request = request


class StepError(PykvError, RuntimeError):
    """The verbs of a step came in the wrong order, or with arrays that do not fit the plan; nothing was changed."""


class PoisonedError(PykvError, RuntimeError):
    """An invariant broke or the compiled core panicked: the object refuses all further work."""


class EngineDeadError(PykvError, RuntimeError):
    """The engine's thread has ended because of an error; no request can be served any more."""


class ModelError(PykvError):
    """A model could not be found or read; the message says where it was looked for."""


class UnsupportedModelError(ModelError):
    """A model was read but its attention cannot be served exactly; the message says which check it failed."""


class MissingExtraError(PykvError, ImportError):
    """A part of pykv was used whose optional dependencies are not installed.

    Attributes:
        extra: the name of the extra to install; empty = the wheel without one.
    """

    def __init__(self, feature: str, extra: str) -> None:
        if extra:
            text = (
                f"{feature} needs optional dependencies that are missing: install the pykv wheel with its extra "
                f"'{extra}', as pip install 'WHEEL[{extra}]' does"
            )
        else:
            text = (
                f"{feature} needs what the pykv wheel brings, and this Python lacks it: install the wheel, as "
                "pip install WHEEL does; in a clone, .venv/bin/python has it"
            )
        super().__init__(text)
        self.extra = extra
