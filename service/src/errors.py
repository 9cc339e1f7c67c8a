"""The ways in which a call can end that only the daemon knows."""

from pykv.errors import PykvError

__all__ = ["ClientTooSlowError", "EngineStalledError", "ModelLoadingError", "ShuttingDownError"]


class ClientTooSlowError(PykvError):
    """The client did not read its stream fast enough, and what may wait for it is bounded."""


class EngineStalledError(PykvError):
    """The engine has work but made no progress for longer than it may."""


class ModelLoadingError(PykvError):
    """The model is not loaded yet; the call may be tried again later."""


class ShuttingDownError(PykvError):
    """The daemon is about to end; the call may be tried on another one."""
