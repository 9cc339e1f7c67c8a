"""Files that an operator names: read within bounds, refused in one line, whatever is in them."""

import errno
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError

__all__ = [
    "check_regular",
    "check_writable",
    "read_bytes",
    "read_toml",
    "remove",
    "shortened",
    "shown",
    "write_whole",
]

MOST_FILE_BYTES = 2**20
MOST_CHARACTERS = 80


def read_toml(path: Path, name: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        name: what the file is, for messages.

    Raises:
        ConfigError: it is no regular file, too large, cannot be read, or is no TOML that Python can hold.
    """
    content = read_bytes(path, name)
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{name} {path} is nested too deeply: allowed are tables of plain values") from None
    except ValueError as error:  # TOMLDecodeError, text that is not UTF-8, integers of thousands of digits
        raise ConfigError(f"{name} {path} is no TOML: {shortened(str(error), 200)}") from None


def check_regular(path: Path, name: str) -> None:
    """Opens a file to see whether it can be read, without waiting as one would for a pipe.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too large.
    """
    os.close(_opened(path, name))


def check_writable(path: Path, name: str) -> None:
    """Sees whether `write_whole` could write a file, in the place of one that may be there.

    Raises:
        ConfigError: it could not, or what is there is no regular file.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_other = os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode)
        if not is_other:
            part = _part_of(path)
            part.touch()
            part.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, name, error) from error
    if is_other:
        raise ConfigError(f"{name} {path} is no regular file: allowed is such a file, or none yet")


def write_whole(path: Path, text: str, name: str) -> None:
    """Writes a file; whoever finds it finds all of it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        part = _part_of(path)
        part.write_text(text)
        part.replace(path)
    except (OSError, ValueError) as error:
        raise _unwritable(path, name, error) from error


def remove(path: Path, name: str) -> None:
    """Removes a file, if it is there.

    Raises:
        ConfigError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        allowed = "none, or one that may be removed"
        raise ConfigError(
            f"{name} {path} cannot be removed: {error.strerror}: allowed is {allowed}"
        ) from error


def shown(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    try:
        return shortened(repr(value))
    except (
        ValueError,
        RecursionError,
    ):  # an integer of thousands of digits, or thousands of tables in each other
        return f"a huge {type(value).__name__}"


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _part_of(path: Path) -> Path:
    """The file beside it that becomes it."""
    return path.with_name(f"{path.name}.part")


def _unwritable(path: Path, name: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"{name} {path} cannot be written: {reason}: allowed is a file in a folder that exists"
    )


def read_bytes(path: Path, name: str) -> bytes:
    """All of a file.

    Raises:
        ConfigError: it is no regular file, too large, or cannot be read.
    """
    with open(_opened(path, name), "rb") as file:
        try:
            content = file.read(MOST_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    if len(content) > MOST_FILE_BYTES:
        raise _too_large(path, name)
    return content


def _opened(path: Path, name: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{name} {shown(str(path))} cannot be read: {error}") from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= MOST_FILE_BYTES:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name} {path} is no regular file: allowed is a file, or a link to one")
    raise _too_large(path, name)


def _too_large(path: Path, name: str) -> ConfigError:
    return ConfigError(f"{name} {path} is too large: allowed is up to {MOST_FILE_BYTES} bytes")
