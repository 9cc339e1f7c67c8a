"""The GPU session's script, dry: parts run on the CPU, in the interpreter, and what they measure reaches the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def dry_run(out: Path, *arguments: str) -> dict[str, Any]:
    command = [str(ROOT / "benches" / "gpu_session.sh"), "--dry-run", "--out", str(out), *arguments]
    environment = dict(os.environ, PYTHON=sys.executable, OMP_NUM_THREADS="1")
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr + out.read_text()[-3000:]
    content: dict[str, Any] = json.loads(out.read_text())
    return content


@pytest.mark.timeout(300)  # four parts, each a process that imports torch and triton
def test_measurements_are_checked_and_reach_one_file(tmp_path: Path) -> None:
    content = dry_run(tmp_path / "session.json", "--only", "decode,sharing,moves,engine")
    assert content["parts"].keys() == {"decode", "sharing", "moves", "engine"}
    metrics = {(line["bench"], line["metric"]) for line in content["measurements"]}
    assert {
        ("decode", "relative error"),
        ("decode", "bandwidth"),
        ("moves", "bandwidth"),
        ("sharing", "gain"),
    } <= metrics
    engine = [line for line in content["measurements"] if line["bench"] == "engine"]
    assert sum(line["metric"] == "equal" and line["value"] is True for line in engine) == 4
    assert any(line["metric"] == "swapped in" and line["value"] > 0 for line in engine)
    assert all(
        line.keys() == {"bench", "case", "metric", "value", "unit", "n"} for line in content["measurements"]
    )


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benches" / "gpu" / "session.py"), "--only", "nothing"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert finished.returncode == 2
    assert "'nothing'" in finished.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_runs_dry(tmp_path: Path) -> None:
    content = dry_run(tmp_path / "session.json", "--budget", "800")
    assert len(content["parts"]) == 9
    assert all(part["exit"] == 0 for part in content["parts"].values())
    equal = [line["value"] for line in content["measurements"] if line["metric"] == "equal"]
    assert equal
    assert all(equal)
