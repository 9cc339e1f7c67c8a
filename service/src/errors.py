"""The ways in which a call can end that only the daemon knows."""

from pykv.errors import PykvError

__all__ = [
    "ClientTooSlowError",
    "EngineStalledError",
    "FailedSequenceError",
    "ForbiddenError",
    "ModelLoadingError",
    "NotServedError",
    "RequestMemoryError",
    "ShuttingDownError",
    "TenantLimitError",
    "UnauthenticatedError",
]


class ClientTooSlowError(PykvError):
    """The client did not read its stream fast enough, and what may wait for it is bounded."""


class EngineStalledError(PykvError):
    """The engine has work but made no progress for longer than it may."""


class FailedSequenceError(PykvError):
    """A sequence ended because something went wrong in the engine."""


class ModelLoadingError(PykvError):
    """The model is not loaded yet; the call may be tried again later."""


class NotServedError(PykvError):
    """The daemon was started without what the call asks for."""


class RequestMemoryError(PykvError):
    """More requests come in at once than there is memory for; the call may be tried again later."""


class ShuttingDownError(PykvError):
    """The daemon is about to end; the call may be tried on another one."""


class UnauthenticatedError(PykvError):
    """No tenant stands behind the call."""


class ForbiddenError(PykvError):
    """The tenant behind the call may not make it."""


class TenantLimitError(PykvError):
    """The tenant uses as much as it may.

    Attributes:
        retry_seconds: after so long the call may be tried again.
    """

    def __init__(self, message: str, retry_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
