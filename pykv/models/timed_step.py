"""Tells of a step of the loading: what it does when it begins, and how long it took when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["say_nothing", "timed_step"]


@contextmanager
def timed_step(tell: Callable[[str], None], step: str, why: str = "") -> Iterator[None]:
    """Tells nothing at the end of a step that has failed: the error does.

    Args:
        step: what is done, such as "loading m".
        why: said at the beginning alone.
    """
    tell(f"{step}: {why}" if why else step)
    began = time.monotonic()
    yield
    tell(f"{step} took {time.monotonic() - began:.1f} s")


def say_nothing(_: str) -> None:
    """Stands for who is told where nobody is."""
