"""The examples in docstrings give what they say."""

import doctest
from types import ModuleType

import pytest

import pykv
import pykv.scheduler


@pytest.mark.parametrize("module", [pykv, pykv.scheduler], ids=lambda module: module.__name__)
def test_docstring_example_gives_what_it_says(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 3
    assert failed == 0
