"""Runs every part of the GPU session, each in a process of its own, inside one time budget, into one JSON file.

A part that fails, hangs or crashes the device's context takes nothing with it: what it measured before is kept, and
the next part starts afresh. The first stage runs the tests and fills the compiler's cache with all cores; the second
measures, one part at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# What is measured, in order of importance, with the most seconds each may take.
PARTS = {
    "ceilings": 40,
    "decode": 120,
    "latency": 40,
    "prefill": 110,
    "sharing": 30,
    "moves": 30,
    "engine": 110,
    "tune": 100,
}
WARMED = {"decode": 3, "prefill": 2, "latency": 1, "sharing": 1, "tune": 3}
CORRECTNESS_SECONDS = 210


@dataclass
class Session:
    """One run.

    Attributes:
        out: the one JSON file.
        dry: whether the CPU stands for a GPU.
        folder: where the parts write while they run.
        budget: seconds for everything.
    """

    out: Path
    dry: bool
    budget: float
    folder: Path
    begin: float = field(default_factory=time.monotonic)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begin)

    def start(self, name: str, warm: str | None = None) -> subprocess.Popen[bytes]:
        """Starts a part; its output goes to a log beside the results."""
        command = [sys.executable, str(FOLDER / f"{name}.py")]
        command += ["--dry-run"] if self.dry else []
        command += ["--warm", warm] if warm else ["--out", str(self.folder / f"{name}.jsonl")]
        log = (self.folder / f"{name}{'-warm' if warm else ''}.log").open("ab")
        environment = dict(
            os.environ, TRITON_DEFAULT_FP_FUSION="1", **({"TRITON_INTERPRET": "1"} if self.dry else {})
        )
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finish(self, name: str, process: subprocess.Popen[bytes], limit: float) -> None:
        """Waits for a part and ends it at its limit; what it has measured is stored every few seconds."""
        begin = time.monotonic()
        while process.poll() is None and time.monotonic() - begin < limit:
            self.store()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3.0)
        code = stopped(process)
        self.parts[name] = {"exit": code, "seconds": round(time.monotonic() - begin, 1)}
        if code != 0:
            self.parts[name]["log"] = (self.folder / f"{name}.log").read_text(errors="replace")[-1500:]
        self.store()
        print(
            f"{name}: exit {code} after {self.parts[name]['seconds']} s, {self.left():.0f} s left", flush=True
        )

    def store(self) -> None:
        """Writes the one JSON file anew."""
        lines = [
            json.loads(line)
            for path in sorted(self.folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]
        content = {"dry_run": self.dry, "parts": self.parts, "measurements": lines}
        self.out.write_text(json.dumps(content, indent=1) + "\n")


def stopped(process: subprocess.Popen[bytes]) -> int | str:
    """Ends a process that still runs; returns how it ended."""
    code = process.poll()
    if code is not None:
        return code
    process.kill()
    process.wait()
    return "stopped at its limit"


def run_first_stage(session: Session) -> None:
    """The tests, and beside them the compilations of what is measured later."""
    tests = session.start("correctness")
    warming = [
        session.start(name, f"{index}/{count}")
        for name, count in WARMED.items()
        if not session.dry
        for index in range(count)
    ]
    session.finish("correctness", tests, min(CORRECTNESS_SECONDS, session.left() - 200))
    grace = time.monotonic() + 30
    while any(process.poll() is None for process in warming) and time.monotonic() < grace:
        time.sleep(0.5)
    for process in warming:
        stopped(process)


def run_second_stage(session: Session, names: list[str]) -> None:
    """The measurements, alone on the device."""
    for name in names:
        if session.left() < 15:
            session.parts[name] = {"exit": "not started: no time left"}
            session.store()
            continue
        session.finish(name, session.start(name), min(PARTS[name], session.left() - 5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_session.json"), help="the JSON file")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter"
    )
    parser.add_argument("--budget", type=float, default=465.0, help="seconds for everything")
    parser.add_argument("--only", help=f"parts, with commas between: {', '.join(['correctness', *PARTS])}")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else ["correctness", *PARTS]
    if unknown := set(wanted) - {"correctness", *PARTS}:
        parser.error(f"--only names {sorted(unknown)[0]!r}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options.out, options.dry_run, options.budget, Path(folder))
        if "correctness" in wanted:
            run_first_stage(session)
        run_second_stage(session, [name for name in PARTS if name in wanted])
    return report(session)


def report(session: Session) -> int:
    """Prints the outcome; 0 if every part ended well and no case with an error."""
    measured = json.loads(session.out.read_text())["measurements"]
    errors = [line for line in measured if line["metric"] == "error"]
    for line in errors:
        print(f"{line['bench']}: {line['case']}: {line['value']}"[:300])
    print(json.dumps({"measurements": len(measured), "errors": len(errors), "file": str(session.out)}))
    return 1 if errors or any(part["exit"] != 0 for part in session.parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
