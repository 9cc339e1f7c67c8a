"""The pictures of docs/core.md are what the core does now."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = re.findall(r"^!\[.{20,}\]\(pictures/([\w-]+\.svg)\)$", (DOCS / "core.md").read_text(), re.MULTILINE)
# What the page says of a picture, as it stands in the picture.
CLAIMS = {
    "tables.svg": ["copy_pairs of this step: block 5 → block 6"],
    "prefix_hits.svg": ["step 0: 3 tokens computed"],
    "windows.svg": ["⌈512 / 16⌉ + 1 = 33", "window of 512: 32 to 33", "with a chunk at most 49"],
    "preemption.svg": ["5 preemptions", "0 tokens computed again"],
    "admission.svg": ["65 preemptions", " 0 preemptions"],
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    script = DOCS / "pictures/draw.py"
    done = subprocess.run(
        [sys.executable, script, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_every_drawn_picture_is_shown(drawn: Path) -> None:
    assert len(SHOWN) >= 6
    assert sorted(SHOWN) == sorted(path.name for path in drawn.iterdir())


@pytest.mark.parametrize("name", SHOWN)
def test_picture_shows_what_the_core_does(drawn: Path, name: str) -> None:
    committed = (DOCS / "pictures" / name).read_text()
    message = f"{name} is not what the core does now: run docs/pictures/draw.py and read docs/core.md again"
    assert (drawn / name).read_text() == committed, message


@pytest.mark.parametrize("name", CLAIMS)
def test_picture_shows_what_the_page_says(drawn: Path, name: str) -> None:
    picture = (drawn / name).read_text()
    assert not [claim for claim in CLAIMS[name] if claim not in picture]
