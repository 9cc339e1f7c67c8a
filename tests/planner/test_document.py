"""What docs/plan.md shows is what its commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = r"(?:(?!```).*\n)+"
FENCE = re.compile(
    rf"^```(?P<language>bash|python)\n(?P<code>{LINES})```\n\n```text\n(?P<shown>{LINES})```$", re.M
)
SHOWN = [*FENCE.finditer((ROOT / "docs/plan.md").read_text())]
COMMANDS = {"python": (sys.executable, "-"), "bash": ("bash", "-euo", "pipefail", "-s")}


def test_the_document_shows_output() -> None:
    assert len(SHOWN) >= 9


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block["code"].split("\n")[0][:60])
def test_shown_lines_are_printed(block: re.Match[str], tmp_path: Path) -> None:
    code = block["code"].replace("docs/pictures/", f"{tmp_path}/")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        COMMANDS[block["language"]],
        input=code,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    printed = {line.strip() for line in done.stdout.splitlines()}
    assert not [line for line in block["shown"].splitlines() if line.strip() not in printed], done.stdout
