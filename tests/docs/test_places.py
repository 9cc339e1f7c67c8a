"""The documents name functions and invariants that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A function is written as `name` ([place](../file)) in the tables of docs/design.md.
NAMED_PLACE = re.compile(r"`(?P<name>[\w.:]+)` \(\[[^]]+\]\((?P<file>[^)]+)\)\)")
DEFINITION = r"\b(fn|def|class|struct|enum) {name}\b"
SOURCES = ("pykv", "rust", "kernels/src", "service/src", "tests", "benches")
INVARIANT = re.compile(r"\binvariants? (I\d+)\b", re.IGNORECASE)


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


def test_quoted_invariants_exist() -> None:
    known = set(re.findall(r"^- \*\*(I\d+)\*\*", (ROOT / "docs/invariants.md").read_text(), re.MULTILINE))
    assert len(known) > 10
    files = [
        path for folder in SOURCES for suffix in ("py", "rs") for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    assert files
    quoted = {number for path in files for number in INVARIANT.findall(path.read_text())}
    assert quoted <= known
