"""What memory this machine can still give, and big blocks of it on huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path

__all__ = ["anonymous_memory", "available_bytes"]

CGROUP_LIMITS = (
    # (limit, current use, statistics, the statistics' name for file pages that can be dropped)
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The bytes that can still be allocated: what the machine has left, and what its container may take.

    Returns:
        None where the system does not say (it has no /proc/meminfo).
    """
    amounts = [amount for amount in (_of_machine(proc), _of_container(cgroup)) if amount is not None]
    return min(amounts, default=None)


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of this size, given by the system as it is first written; on huge pages if it can.

    Raises:
        MemoryError: the system refuses.
    """
    try:
        memory = _mapped(num_bytes)
    except OSError as error:
        raise MemoryError(f"the system refused {num_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise_huge_pages(memory)
    return memory


def _mapped(num_bytes: int) -> mmap.mmap:
    """Private memory: what is shared between processes gets no huge pages on most systems."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise_huge_pages(memory: mmap.mmap) -> None:
    """A kernel that was built without huge pages refuses this advice; the memory serves all the same."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return


def _of_machine(proc: Path) -> int | None:
    found = _statistic(proc / "meminfo", "MemAvailable:")
    return None if found is None else found * 1024


def _of_container(cgroup: Path) -> int | None:
    for limit_name, used_name, statistics, droppable in CGROUP_LIMITS:
        limit, used = _number(cgroup / limit_name), _number(cgroup / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used + (_statistic(cgroup / statistics, droppable) or 0))
    return None


def _number(path: Path) -> int | None:
    """The number in a one-line file; None: no such file, or no limit ("max")."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int | None:
    """The number after `name` in a file of lines "name number ..."."""
    if not path.is_file():
        return None
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), None)
