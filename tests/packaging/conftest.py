"""Builds the distribution as a user would: the sdist, and the wheel from the sdist."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARGO_FOLDER = ROOT / "target" / "packaging"
CARGO_SETTINGS = {
    "CARGO_TARGET_DIR": str(CARGO_FOLDER),
    "CARGO_PROFILE_RELEASE_LTO": "off",
    "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
}
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


def run(*command: str | Path, cwd: Path, timeout_seconds: float = 600, **environment: str) -> str:
    """Runs a command that must succeed; its output is in the failure."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "maturin", "sdist", "--out", out, cwd=ROOT)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled anew from the sdist; only other people's crates are kept from an earlier run.

    The files of an sdist all bear one old date, so cargo would take an earlier build of our crates for fresh. What
    optimizes over crates is left out here: it takes most of the time and changes nothing that these tests look at.
    """
    out = tmp_path_factory.mktemp("wheel")
    own = [
        f"--package=pykv-{folder.name}"
        for folder in (ROOT / "rust").iterdir()
        if (folder / "Cargo.toml").exists()
    ]
    run("cargo", "clean", "--release", "--target-dir", CARGO_FOLDER, *own, cwd=ROOT)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, sdist, cwd=out, **CARGO_SETTINGS)
    (archive,) = out.glob("*.whl")
    return archive


class Environment:
    """A virtual environment without pip, outside the repository."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        (self.site_packages,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        run(*pip, *arguments, cwd=self.folder, timeout_seconds=1500)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", wheel)

    def run(self, *command: str | Path, **environment: str) -> str:
        return run(*command, cwd=self.folder, **environment)


@pytest.fixture
def make_environment(tmp_path: Path) -> Callable[[str], Environment]:
    return lambda name: Environment(tmp_path / name)


@pytest.fixture
def empty_environment(make_environment: Callable[[str], Environment]) -> Environment:
    return make_environment("empty")


@pytest.fixture
def base_environment(make_environment: Callable[[str], Environment], wheel: Path) -> Environment:
    """The wheel without extras: numpy is the only other package."""
    made = make_environment("base")
    numpy_parts = list(SITE_PACKAGES.glob("numpy*"))
    assert numpy_parts
    for part in numpy_parts:
        (made.site_packages / part.name).symlink_to(part)
    made.install(wheel)
    return made


@pytest.fixture
def full_environment(make_environment: Callable[[str], Environment], wheel: Path) -> Environment:
    """The wheel, and this environment's packages behind it instead of gigabytes of new downloads.

    A path file's folders are searched, but path files in those are not read: no editable pykv is seen there.
    """
    made = make_environment("full")
    (made.site_packages / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    made.install(wheel)
    return made
