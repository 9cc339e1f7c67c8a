"""Every python and bash block of the documents runs, each by itself, in the repository's root."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# Blocks of Rust run as documentation tests of the crate that includes the document.
LANGUAGES = {"python", "bash", "text", "toml", "json", "rust"}
COMMANDS = {"python": (sys.executable, "-"), "bash": ("bash", "-euo", "pipefail", "-s")}
TIMEOUT_SECONDS = {"fast": 100, "long": 1500}


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    speed: str
    code: str


def blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for fence in FENCE.finditer(text):
        language, _, speed = fence["info"].partition(" ")
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(f"{document.relative_to(ROOT)}:{line}", language, speed or "fast", fence["code"])


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def runnable() -> Iterator[object]:
    for block in BLOCKS:
        if block.language in COMMANDS:
            marks = [pytest.mark.timeout(TIMEOUT_SECONDS[block.speed] + 20)]
            marks += [pytest.mark.long] if block.speed == "long" else []
            yield pytest.param(block, id=block.place, marks=marks)


def run_block(block: Block) -> tuple[int, str]:
    """Runs a block in a process group of its own, which ends with it."""
    process = subprocess.Popen(
        COMMANDS[block.language],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(block.code, timeout=TIMEOUT_SECONDS[block.speed])
    finally:
        end_group(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()  # or a block that took too long fails a later test besides, by a warning
    return process.returncode, output


def end_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@pytest.mark.parametrize("block", list(runnable()))
def test_block_runs(block: Block) -> None:
    code, output = run_block(block)
    assert code == 0, f"{block.place} ended with {code}:\n{output}"


def test_readme_has_blocks_of_both_languages() -> None:
    languages = [block.language for block in BLOCKS if block.place.startswith("README.md")]
    assert languages.count("python") >= 3
    assert languages.count("bash") >= 3


def test_every_block_says_what_it_is() -> None:
    assert BLOCKS
    unknown = [(block.place, block.language) for block in BLOCKS if block.language not in LANGUAGES]
    assert not unknown
    assert {block.speed for block in BLOCKS} <= set(TIMEOUT_SECONDS)


def test_blocks_that_write_to_a_folder_that_git_ignores_make_it() -> None:
    """In a clean clone it is not there."""
    writing = [
        block for block in BLOCKS if block.language == "bash" and re.search(r"(>|-file) ?target/", block.code)
    ]
    assert writing
    assert not [block.place for block in writing if "mkdir -p target" not in block.code]


def test_every_document_with_rust_is_included_by_the_crate() -> None:
    documents = {block.place.partition(":")[0] for block in BLOCKS if block.language == "rust"}
    assert documents
    crate = (ROOT / "rust/core/src/lib.rs").read_text()
    assert not [document for document in documents if f'include_str!("../../../{document}")' not in crate]


def test_every_make_command_in_the_documents_exists() -> None:
    named = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", document.read_text())}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "ci"} <= named <= targets


def test_every_link_between_the_documents_leads_somewhere() -> None:
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text())
    ]
    assert len(links) > 10
    assert not [(document, target) for document, target in links if not (document.parent / target).exists()]


def anchors_of(document: Path) -> set[str]:
    """The headings, as links name them: lower case, hyphens for blanks, no other signs."""
    text = re.sub(
        r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL
    )  # comments are none
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_heading_leads_to_one() -> None:
    links = [
        (document, document if not place else document.parent / place, anchor)
        for document in DOCUMENTS
        for place, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text())
    ]
    assert len(links) > 10
    assert not [link for link in links if link[1].suffix == ".md" and link[2] not in anchors_of(link[1])]


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/adr"
    numbered = {path.name for path in folder.glob("[0-9]*.md")}
    assert len(numbered) >= 9
    assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())) == numbered
