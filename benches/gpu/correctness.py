"""Do the kernels' own tests pass on this GPU? They are the ones that run in the interpreter elsewhere.

Run: benches/gpu/correctness.py [--out FILE] [--dry-run]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from machine import ROOT, SUPPORT, Part, open_part

LIMIT_SECONDS = 200
WORKERS = 8


def run_tests(part: Part, folder: Path) -> Path:
    """Runs the tests in several processes; returns their JUnit file."""
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    long: the slow forms\n")
    report = folder / "junit.xml"
    tests = ROOT / "tests" / "kernels" / "running"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(settings),
        "-q",
        "-m",
        "not long",
        f"--junitxml={report}",
    ]
    command += ["-p", "no:cacheprovider", "--confcutdir", str(ROOT / "tests" / "kernels")]
    if part.machine.dry:
        command += ["-k", "test_decode_equals_float64 and plain", str(tests / "test_decode.py")]
    else:
        command += ["-n", str(WORKERS), str(tests)]
    environment = dict(os.environ, PYKV_KERNEL_TESTS="running", PYKV_KERNEL_DEVICE=part.machine.device)
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), environment.get("PYTHONPATH", "")])
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    if not report.exists():
        raise RuntimeError((finished.stdout + finished.stderr)[-500:])
    return report


def main(part: Part) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cases = list(ElementTree.parse(run_tests(part, Path(folder))).iter("testcase"))
    bad = [
        (case, problem) for case in cases for problem in [*case.findall("failure"), *case.findall("error")]
    ]
    part.report.add("kernel tests", "run", len(cases), "tests")
    part.report.add("kernel tests", "failed", len(bad), "tests")
    for case, problem in bad[:40]:
        text = problem.get("message") or ""
        part.report.add(f"{case.get('classname')}::{case.get('name')}", "error", text[:400], "text")


if __name__ == "__main__":
    opened = open_part("correctness")
    opened.attempt("kernel tests", lambda: main(opened))
