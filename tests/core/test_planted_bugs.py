"""The planted bugs of rust/core/mutants.toml have a place in the sources, and the document names each with its test."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """The script, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("planted_bugs", ROOT / ".ci/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_planted_bug_has_one_place_and_changes_something(mutants: ModuleType) -> None:
    bugs = mutants.load()
    assert len(bugs) >= 12
    for bug in bugs:
        assert bug.planted(mutants.CRATE) != bug.path(mutants.CRATE).read_text(), bug.name


def test_a_bug_whose_place_is_gone_is_an_error(mutants: ModuleType) -> None:
    bug = mutants.Mutant("gone", "-", "lib.rs", "this stands nowhere", "", "lib", "-")
    with pytest.raises(SystemExit, match="gone: its place stands 0 times"):
        bug.planted(mutants.CRATE)


def test_the_document_names_each_bug_with_its_test(mutants: ModuleType) -> None:
    document = (ROOT / "docs/proofs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| `(\w+)` \|$", document, re.MULTILINE)
    assert rows == [(bug.name, bug.fault, bug.test.split("::")[-1]) for bug in mutants.load()]


def test_a_few_are_planted_often(mutants: ModuleType) -> None:
    assert 1 <= sum(bug.often for bug in mutants.load()) <= 3
