"""Folders that are made once, kept in the user's cache, and either whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pykv.errors import ModelError

try:
    import fcntl
except (
    ImportError
):  # no such locks on this system: two processes may do the same work, and one result is kept
    fcntl = None  # type: ignore[assignment]

__all__ = ["cache_dir", "file_sha256", "is_complete", "made_once"]

MANIFEST = "pykv.json"


def cache_dir() -> Path:
    """Where pykv keeps what it can make again: $PYKV_CACHE_DIR, or `pykv` in the user's cache."""
    own = os.environ.get("PYKV_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pykv"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`, made by `make` unless it is there already and whole.

    It appears in one step, and only when it is complete. Of several processes one makes it and the others
    wait. A folder that lost a file, or in which a byte changed, is made again.

    Args:
        make: fills the empty folder that it is given.

    Raises:
        ModelError: the cache cannot be written.
    """
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if not is_complete(folder):
                _make(folder, make)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be written ({error}); PYKV_CACHE_DIR says where it is"
        ) from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file is there as it was written."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    digests = _read_manifest(manifest)
    return bool(digests) and all(
        (folder / name).is_file() and file_sha256(folder / name) == digest for name, digest in digests.items()
    )


def _read_manifest(manifest: Path) -> dict[str, str]:
    """The digest of each file; nothing where the manifest itself is damaged."""
    try:
        found = json.loads(manifest.read_bytes())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        make(fresh)
        digests = {path.name: file_sha256(path) for path in sorted(fresh.iterdir())}
        (fresh / MANIFEST).write_text(json.dumps(digests, indent=1))
        if folder.exists():
            os.replace(folder, Path(scratch) / "damaged")
        _put(fresh, folder)


def _put(fresh: Path, folder: Path) -> None:
    """Renames; where another process was faster and its folder is whole, that one stays."""
    try:
        os.replace(fresh, folder)
    except OSError:
        if not is_complete(folder):
            raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; given back also by a process that is killed."""
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
