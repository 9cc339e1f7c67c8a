"""How much memory is left, as the system and a container say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykv.host_memory import anonymous_memory, available_bytes

MEMINFO = "MemTotal:       2000 kB\nMemFree:         500 kB\nMemAvailable:   1000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_text(MEMINFO)
    return folder


def limit_container(folder: Path, limit: str, used: int, droppable: int) -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")
    return folder


def test_machine_without_a_container(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 1000 * 1024


def test_container_with_less_than_the_machine(proc: Path, tmp_path: Path) -> None:
    cgroup = limit_container(tmp_path / "cgroup", "500000", used=300_000, droppable=1_000)
    assert available_bytes(proc, cgroup) == 201_000


def test_container_without_a_limit(proc: Path, tmp_path: Path) -> None:
    cgroup = limit_container(tmp_path / "cgroup", "max", used=300_000, droppable=0)
    assert available_bytes(proc, cgroup) == 1000 * 1024


def test_container_beyond_its_limit_has_nothing(proc: Path, tmp_path: Path) -> None:
    cgroup = limit_container(tmp_path / "cgroup", "500000", used=600_000, droppable=0)
    assert available_bytes(proc, cgroup) == 0


def test_old_container_layout(proc: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cgroup" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("500000\n")
    (folder / "memory.usage_in_bytes").write_text("100000\n")
    (folder / "memory.stat").write_text("total_inactive_file 7\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 400_007


def test_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None


def test_anonymous_memory_is_zero_and_writable() -> None:
    memory = anonymous_memory(3 << 20)
    assert len(memory) == 3 << 20
    memory[-1] = 7
    assert memory[0] == 0
    assert memory[-1] == 7


def test_memory_that_no_system_has() -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        anonymous_memory(1 << 60)
