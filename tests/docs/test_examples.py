"""Every file in examples/ runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TALKS_TO_A_DAEMON = "client.py"
ALONE = [example for example in EXAMPLES if example.name != TALKS_TO_A_DAEMON]


def run_example(example: Path, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, example, *arguments],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_are_examples() -> None:
    assert {"core_alone.py", "hf_model.py", TALKS_TO_A_DAEMON} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("example", ALONE, ids=lambda path: path.stem)
def test_example_runs_and_shows_something(example: Path, tmp_path: Path) -> None:
    assert run_example(example, cwd=tmp_path).strip()


def test_client_example_gets_the_answers(daemon_address: str, tmp_path: Path) -> None:
    output = run_example(ROOT / "examples" / TALKS_TO_A_DAEMON, daemon_address, cwd=tmp_path)
    assert "The capital of France is Paris." in output
    assert "0 blocks are in use now" in output


def test_model_example_shares_the_prompts_beginning(tmp_path: Path) -> None:
    output = run_example(ROOT / "examples" / "hf_model.py", cwd=tmp_path)
    assert "Paris" in output
    assert "[stop, 16 prompt tokens from the cache]" in output
