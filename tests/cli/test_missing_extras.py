"""Every way to start a program says in one line which extra it needs, where what the extra brings is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import pykv.cli
from pykv.cli.main import COMMANDS

BROUGHT = (
    "torch",
    "transformers",
    "grpclib",
    "google.protobuf",
    "structlog",
    "rich",
    "anyio",
    "prometheus_client",
)
MODULES = sorted(path.parent.name for path in Path(pykv.cli.__file__).parent.glob("*/__main__.py"))
"""The folders that `python -m` runs; each is called as its command."""


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    without = f"import sys; sys.modules.update(dict.fromkeys({BROUGHT!r})); "
    return subprocess.run(
        [sys.executable, "-c", without + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def check_refused(done: subprocess.CompletedProcess[str], extra: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert f"with its extra '{extra}', as pip install 'WHEEL[{extra}]' does" in done.stderr


def started_as_module(module: str, *arguments: str) -> str:
    argv = ["python", *arguments]
    return f"import runpy; sys.argv = {argv!r}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def test_the_folders_that_are_programs_are_commands() -> None:
    assert {"demo", "top"} <= set(MODULES) <= set(COMMANDS)


@pytest.mark.parametrize("name", MODULES)
def test_a_folder_that_is_a_program_names_its_extra(name: str) -> None:
    check_refused(run_without_extras(started_as_module(f"pykv.cli.{name}")), COMMANDS[name].extra)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_its_extra_or_needs_none(name: str) -> None:
    done = run_without_extras(started_as_module("pykv.cli.main", name, "--help"))
    extra = COMMANDS[name].extra
    if extra:
        check_refused(done, extra)
    else:
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("script", "extra"), [("run_client", "client"), ("run_server", "serve")])
def test_a_script_names_its_extra(script: str, extra: str) -> None:
    code = f"from pykv.cli.launch import {script}; sys.argv = ['program', 'chat']; sys.exit({script}())"
    check_refused(run_without_extras(code), extra)
