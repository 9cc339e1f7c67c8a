"""The file by which who waits for the daemon learns that it serves, and where."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from pykv.errors import ConfigError
from pykv.service.files import check_writable, read_bytes, remove, write_whole

__all__ = ["ReadyFile"]

NAME = "ready_file"

log = structlog.get_logger("pykv.service")


class ReadyFile:
    """There as long as requests are served.

    Args:
        path: None = nobody waits for it.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            check_writable(path, NAME)

    def clear(self) -> None:
        """Removes what a run before has left behind.

        Raises:
            ConfigError: it cannot be removed.
        """
        if self._path is not None:
            remove(self._path, NAME)

    @contextmanager
    def telling(self, address: str) -> Iterator[None]:
        """The file holds the address until the block is left; another daemon's file is left alone.

        Raises:
            ConfigError: it cannot be written.
        """
        if self._path is None:
            yield
            return
        content = f"{address}\n"
        write_whole(self._path, content, NAME)
        try:
            yield
        finally:
            self._remove_own(self._path, content.encode())

    def _remove_own(self, path: Path, content: bytes) -> None:
        try:
            if path.exists() and read_bytes(path, NAME) == content:
                remove(path, NAME)
        except (ConfigError, OSError) as error:
            log.warning("ready file stays", error=str(error))
