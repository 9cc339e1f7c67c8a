"""Turns a missing optional dependency into an error that names the extra to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from pykv.errors import MissingExtraError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(feature: str, extra: str) -> Iterator[None]:
    """Wraps the imports of `feature`, whose dependencies the extra `extra` brings.

    Raises:
        MissingExtraError: a module that is no part of pykv was not found in the wrapped imports.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "pykv":
            raise
        raise MissingExtraError(feature, extra) from error
