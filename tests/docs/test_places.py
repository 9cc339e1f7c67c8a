"""The documents name functions and invariants that exist."""

import inspect
import re
from pathlib import Path

import pytest

from pykv.blocks import BlockPool, PrefixCache
from pykv.engine.config import EVICTIONS, EngineConfig
from pykv.errors import ConfigError
from pykv.scheduler_config import SchedulerConfig
from pykv.simulator.policy import PRODUCTION_POLICIES

ROOT = Path(__file__).parents[2]
# A function is written as `name` ([place](../file)) in the tables of docs/design.md.
NAMED_PLACE = re.compile(r"`(?P<name>[\w.:]+)` \(\[[^]]+\]\((?P<file>[^)]+)\)\)")
DEFINITION = r"\b(fn|def|class|struct|enum) {name}\b"
SOURCES = ("pykv", "rust", "kernels/src", "service/src", "tests", "benches")
INVARIANT = re.compile(r"\"(I\d+ [a-z ]+)\"|\b[Ii]nvariants? (I\d+)\b")


def test_the_life_of_a_request_names_functions_that_exist() -> None:
    document = ROOT / "docs/design.md"
    places = list(NAMED_PLACE.finditer(document.read_text()))
    assert len(places) >= 10
    missing = []
    for place in places:
        name = re.split(r"[.:]+", place["name"])[-1]
        source = (document.parent / place["file"]).read_text()
        if not re.search(DEFINITION.format(name=name), source):
            missing.append(place[0])
    assert not missing


def test_quoted_invariants_are_written_down() -> None:
    known = re.findall(
        r"^- \*\*(I\d+)( [a-z ]+)?\*\*", (ROOT / "docs/invariants.md").read_text(), re.MULTILINE
    )
    numbers = [number for number, _ in known]
    assert len(set(numbers)) == len(numbers) > 10
    names = [number + name for number, name in known]
    quoted = {match for path in source_files() for match in INVARIANT.findall(path.read_text())}
    assert len(quoted) > 5
    unknown = [
        full or number
        for full, number in quoted
        if not (number in numbers or any(full and name.startswith(full) for name in names))
    ]
    assert not unknown


def source_files() -> list[Path]:
    found = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".rs"}
    ]
    assert len(found) > 20
    return found


@pytest.fixture
def policies() -> tuple[str, ...]:
    """The core's policies of eviction, as its refusal of any other names them."""
    with pytest.raises(ConfigError) as refusal:
        PrefixCache(BlockPool(8, 4), eviction="none of them")
    return tuple(str(refusal.value).partition("allowed is ")[2].split(" or "))


def test_every_policy_of_eviction_is_named_where_new_policy_says(policies: tuple[str, ...]) -> None:
    assert len(policies) >= 2
    assert policies == EVICTIONS == PRODUCTION_POLICIES
    for name in policies:
        SchedulerConfig(num_blocks=8, eviction=name)
    for described in (SchedulerConfig, PrefixCache, EngineConfig):
        text = inspect.getdoc(described)
        assert text is not None
        assert not [name for name in policies if f'"{name}"' not in text], described
