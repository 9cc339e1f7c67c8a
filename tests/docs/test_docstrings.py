"""The examples in docstrings give what they say."""

import doctest
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import pykv

PACKAGE = Path(pykv.__file__).parent


def modules_with_examples() -> list[ModuleType]:
    """The modules of the package, linked folders included, in which a line begins with a prompt of Python."""
    parts = [PACKAGE, PACKAGE / "kernels", PACKAGE / "service"]
    files = {
        path
        for part in parts
        for path in part.rglob("*.py")
        if "\n>>> " in path.read_text().replace("    ", "")
    }
    names = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(files)]
    return [import_module(".".join(name).removesuffix(".__init__")) for name in names]


def test_there_are_examples_in_docstrings() -> None:
    assert {"pykv", "pykv.scheduler"} <= {module.__name__ for module in modules_with_examples()}


@pytest.mark.parametrize("module", modules_with_examples(), ids=lambda module: module.__name__)
def test_docstring_example_gives_what_it_says(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
