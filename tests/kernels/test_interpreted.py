"""Starts the tests of `running/`: the kernels, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_interpreted(selection: str) -> None:
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        PYKV_KERNEL_TESTS="running",
        PYTHONPATH=str(FOLDER / "support"),
        OMP_NUM_THREADS="1",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(FOLDER / "running"),
        "-q",
        "-m",
        selection,
        "-p",
        "no:cacheprovider",
    ]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-20000:] + finished.stderr[-5000:]


@pytest.mark.timeout(600)  # a session of many tests, each with a limit of its own
def test_kernels_are_right_in_the_interpreter() -> None:
    run_interpreted("not long")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_are_right_in_the_interpreter_in_every_combination() -> None:
    run_interpreted("long")
