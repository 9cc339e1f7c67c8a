"""Folders that are made once: whole or not there, remade when damaged, made by one process of many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pykv import ModelError
from pykv.models.cache_folder import MANIFEST, cache_dir, is_complete, made_once


def write_files(folder: Path) -> None:
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")


def never(_: Path) -> None:
    pytest.fail("it is there already")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_once(tmp_path / "models" / "tiny", write_files)


def test_folder_is_made_with_its_parents_and_then_kept(folder: Path) -> None:
    assert (folder / "a.txt").read_text() == "one"
    assert is_complete(folder)
    assert made_once(folder, never) == folder


@pytest.mark.parametrize("damage", ["missing", "changed", "short"])
def test_damaged_file_is_made_again(folder: Path, damage: str) -> None:
    file = folder / "b.txt"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("twx" if damage == "changed" else "tw")
    assert not is_complete(folder)
    made_once(folder, write_files)
    assert file.read_text() == "two"
    assert is_complete(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe"])
def test_damaged_manifest_is_made_again(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    assert not is_complete(folder)
    made_once(folder, write_files)
    assert is_complete(folder)


def test_folder_without_a_manifest_is_made_again(tmp_path: Path) -> None:
    half_made = tmp_path / "tiny"
    half_made.mkdir()
    write_files(half_made)
    (half_made / "stale.txt").write_text("old")
    made_once(half_made, write_files)
    assert sorted(path.name for path in half_made.iterdir()) == ["a.txt", "b.txt", MANIFEST]


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_files(folder)
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        made_once(tmp_path / "tiny", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.lock"]


def test_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"models/tiny cannot be written .*PYKV_CACHE_DIR"):
        made_once(tmp_path / "models" / "tiny", write_files)


MAKE = """
import sys
from pathlib import Path
from pykv.models.cache_folder import made_once

folder, log, expected = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def make(fresh):
    with log.open("a") as file:
        file.write("made\\n")
    (fresh / "big.bin").write_bytes(b"x" * 5_000_000)

made_once(folder, make)
print((folder / "big.bin").stat().st_size == expected)
"""


def test_of_processes_at_once_one_makes_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKE, str(tmp_path / "tiny"), str(log), "5000000"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["True"] * 4
    assert log.read_text() == "made\n"
    assert json.loads((tmp_path / "tiny" / MANIFEST).read_text()).keys() == {"big.bin"}


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKV_CACHE_DIR", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("PYKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/users/cache")
    assert cache_dir() == Path("/users/cache/pykv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "pykv"
