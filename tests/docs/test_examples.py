"""Every file in examples/ runs and shows what it should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.name: path for path in (ROOT / "examples").glob("*.py")}
SHOWN = {
    "client.py": "The capital of France is Paris.",
    "core_alone.py": "96 of them from the cache",
    "hf_model.py": "The capital of France is Paris.",
    "make_traces.py": "378 requests of 40 sessions",
    "own_engine.py": r" [1-9]\d* blocks swapped in\n16 outputs, the same tokens when they are swapped\n"
    r".*\nthe same tokens with both",
}
TALKS_TO_A_DAEMON = {"client.py"}


def test_every_example_is_known() -> None:
    assert set(EXAMPLES) == set(SHOWN)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_shows_what_it_should(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = [request.getfixturevalue("daemon_address")] if name in TALKS_TO_A_DAEMON else []
    done = subprocess.run(
        [sys.executable, EXAMPLES[name], *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(SHOWN[name], done.stdout), done.stdout
