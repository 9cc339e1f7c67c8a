"""What `import pykv` brings, and what it must not bring."""

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pykv
import pykv.errors

HEAVY = ("torch", "transformers", "grpclib", "triton", "google.protobuf", "structlog", "rich", "cryptography")
LAZY = pykv._LAZY


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def modules_after(statement: str) -> set[str]:
    return set(
        json.loads(run_python(f"import json, sys, pykv; {statement}; print(json.dumps(list(sys.modules)))"))
    )


def test_import_brings_no_heavy_module() -> None:
    loaded = modules_after("pass")
    assert "pykv" in loaded
    assert not set(HEAVY) & loaded


def test_scheduler_needs_numpy_alone() -> None:
    loaded = modules_after("pykv.Scheduler")
    assert "numpy" in loaded
    assert not set(HEAVY) & loaded


def test_every_public_name_is_found() -> None:
    assert len(pykv.__all__) > 20
    for name in pykv.__all__:
        assert getattr(pykv, name) is not None


def test_all_equals_what_is_visible() -> None:
    for name in pykv.__all__:
        getattr(pykv, name)
    visible = {
        name
        for name, value in vars(pykv).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert visible == set(pykv.__all__) == set(dir(pykv))
    assert len(pykv.__all__) == len(set(pykv.__all__))


def test_every_error_is_public() -> None:
    assert set(pykv.errors.__all__) <= set(pykv.__all__)


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse(Path(pykv.__file__).read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If) and "not" not in ast.unparse(node.test)]
    imports = [node for guard in guarded for node in guard.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {name: module for name, (module, _) in LAZY.items()}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Shceduler'"):
        pykv.Shceduler  # noqa: B018


def test_version_is_the_distributions() -> None:
    assert pykv.__version__.count(".") == 2


@pytest.mark.parametrize("name", [name for name, (_, extra) in LAZY.items() if extra])
def test_missing_extra_is_named(name: str) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))  # None: the import system raises ModuleNotFoundError
import pykv
try:
    pykv.{name}
except pykv.MissingExtraError as error:
    print(error.extra, error, sep="|")
"""
    extra, message = run_python(code).strip().split("|")
    assert extra == LAZY[name][1]
    assert f"pykv.{name}" in message
    assert f"'{extra}'" in message
