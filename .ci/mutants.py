"""Plants the bugs of rust/core/mutants.toml, one at a time, and wants the named test to fail for each.

`python .ci/mutants.py [--often] [NAME ...]`: all, the few that are planted often, or those that are named. The core is
copied to target/mutants first; nothing else is touched. Ends with an error if a bug survives, if a change does not
compile or its place is gone, or if a named test does not pass on the core as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CRATE = ROOT / "rust/core"
SCRATCH = ROOT / "target/mutants"
BUILD_SECONDS, TEST_SECONDS = 600, 60


@dataclass(frozen=True)
class Mutant:
    """One planted bug; the fields are explained in mutants.toml."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    target: str
    test: str
    often: bool = False

    def path(self, crate: Path) -> Path:
        return crate / "src" / self.file

    def planted(self, crate: Path) -> str:
        """The source with the bug in it."""
        source = self.path(crate).read_text()
        if (count := source.count(self.old)) != 1:
            raise SystemExit(
                f"{self.name}: its place stands {count} times in {self.file}, it must stand there once"
            )
        return source.replace(self.old, self.new)


def load() -> list[Mutant]:
    entries = tomllib.loads((CRATE / "mutants.toml").read_text())
    return [Mutant(name, **fields) for name, fields in entries.items()]


def copy_core() -> Path:
    """A workspace of the core alone."""
    crate = SCRATCH / "rust/core"
    shutil.rmtree(SCRATCH / "rust", ignore_errors=True)
    # Times of now: what an earlier run has built from planted sources is older.
    shutil.copytree(CRATE, crate, copy_function=shutil.copyfile)
    manifest = (ROOT / "Cargo.toml").read_text()
    first, last = manifest.index("members"), manifest.index("\n", manifest.index("members"))
    (SCRATCH / "Cargo.toml").write_text(f'{manifest[:first]}members = ["rust/core"]{manifest[last:]}')
    shutil.copy(ROOT / "Cargo.lock", SCRATCH / "Cargo.lock")
    return crate


def cargo(target: str, *arguments: str, seconds: int) -> tuple[int | None, str]:
    """Runs `cargo test` on the copy. Returns its exit status, none after a time limit, and what it printed."""
    kind = ["--lib"] if target in ("lib", "loom") else ["--test", target]
    command = ["cargo", "test", "--quiet", "--offline", "--package", "pykv-core", *kind]
    # One failing history is enough: it need not be made short.
    environment = {**os.environ, "PROPTEST_MAX_SHRINK_ITERS": "0", "RUST_BACKTRACE": "0"}
    if target == "loom":
        command += ["--release", "--target-dir", "target/loom"]
        environment["RUSTFLAGS"] = "--cfg loom"
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=SCRATCH,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # The whole group: cargo's child is what hangs.
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, output


def build(target: str, name: str) -> None:
    status, output = cargo(target, "--no-run", seconds=BUILD_SECONDS)
    if status != 0:
        raise SystemExit(f"{name}: does not compile\n{output}")


def run_test(target: str, test: str) -> tuple[int | None, str]:
    return cargo(target, test, "--", "--exact", seconds=TEST_SECONDS)


def check_tests(mutants: list[Mutant]) -> None:
    """Whether each named test exists and passes on the core as it is."""
    for target, test in dict.fromkeys((mutant.target, mutant.test) for mutant in mutants):
        build(target, target)
        status, output = run_test(target, test)
        if status != 0 or "1 passed" not in output:
            raise SystemExit(f"{target} {test}: does not pass before anything is planted\n{output}")


def survives(mutant: Mutant, crate: Path) -> bool:
    """Plants a bug, runs its test and takes the bug out again."""
    path = mutant.path(crate)
    pristine = path.read_text()
    try:
        path.write_text(mutant.planted(crate))
        build(mutant.target, mutant.name)
        start = time.monotonic()
        status, output = run_test(mutant.target, mutant.test)
    finally:
        path.write_text(pristine)
    seconds = time.monotonic() - start
    verdict = {0: "SURVIVED", None: "HUNG"}.get(status, "caught")
    why = next((line for line in output.splitlines() if "panicked at" in line), "")
    print(f"{verdict:9}{mutant.name:26}{seconds:6.1f} s  {mutant.test}  {why}", flush=True)
    return verdict != "caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--often", action="store_true", help="only those that are planted often")
    options = parser.parse_args()
    mutants = load()
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"unknown bug {', '.join(sorted(unknown))}")
    for mutant in mutants:
        mutant.planted(CRATE)
    chosen = [
        mutant
        for mutant in mutants
        if (not options.names or mutant.name in options.names) and (mutant.often or not options.often)
    ]
    crate = copy_core()
    check_tests(chosen)
    survivors = [mutant.name for mutant in chosen if survives(mutant, crate)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs were caught")
    if survivors:
        print(f"nobody noticed: {', '.join(survivors)}", file=sys.stderr)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
