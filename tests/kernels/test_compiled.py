"""Starts the tests of `compiled/`: the kernels, compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_compiled(selection: str, cache: Path) -> None:
    environment = dict(
        os.environ,
        PYKV_KERNEL_TESTS="compiled",
        PYTHONPATH=str(FOLDER / "support"),
        OMP_NUM_THREADS="1",
        TRITON_CACHE_DIR=str(cache),
    )
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", str(FOLDER / "compiled"), "-q", "-m", selection]
    command += ["-p", "no:cacheprovider", "--timeout", "1800"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-20000:] + finished.stderr[-5000:]


@pytest.mark.timeout(600)  # a session of many tests, each with a limit of its own
def test_kernels_compile_ahead_of_time(tmp_path: Path) -> None:
    run_compiled("not long", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kernels_compile_ahead_of_time_in_every_combination(tmp_path: Path) -> None:
    run_compiled("long", tmp_path)
