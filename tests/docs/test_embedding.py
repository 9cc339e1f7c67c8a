"""The tables of docs/embedding.md name every call, and every error that a docstring names."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pykv.blocks import BlockPool, BlockTable, PrefixCache
from pykv.events import content_keys
from pykv.recording import Recording, replay_recording
from pykv.scheduler import Scheduler, SchedulerConfig, StepBuffers
from pykv.scope import scope_of

DOCUMENT = (Path(__file__).parents[2] / "docs/embedding.md").read_text()
CLASSES = (Scheduler, SchedulerConfig, StepBuffers, BlockPool, BlockTable, PrefixCache)
FUNCTIONS = (content_keys, scope_of, replay_recording, Recording.close)
RAISED = re.compile(r"^ {4}([A-Z]\w*Error(?:, [A-Z]\w*Error)*):", re.MULTILINE)


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading."""
    section = DOCUMENT.split(f"\n## {heading}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def code_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def methods_of(kind: type) -> Iterator[tuple[str, object]]:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            yield name, method


def documented_errors() -> set[tuple[str, str]]:
    """(error, call) as the docstrings have them; `PoisonedError` may come from everywhere."""
    calls: list[tuple[str, object]] = [(function.__name__, function) for function in FUNCTIONS]
    for kind in CLASSES:
        calls += [(kind.__name__, kind), *methods_of(kind)]
    found = set()
    for name, call in calls:
        raises = (inspect.getdoc(call) or "").partition("\nRaises:\n")[2]
        for errors in RAISED.findall(raises):
            found |= {(error, name) for error in errors.split(", ") if error != "PoisonedError"}
    return found


def test_every_call_of_the_scheduler_has_its_time() -> None:
    listed = [name for call, _ in rows_of("Who may call what") for name in code_in(call)]
    assert len(listed) > 15
    assert sorted(listed) == sorted(name for name, _ in methods_of(Scheduler))


def test_the_errors_are_those_of_the_docstrings() -> None:
    listed = set()
    for error, calls, _ in rows_of("Errors"):
        names = set(code_in(calls)) - {"now", "BlockTable"}
        if code_in(error)[0] == "OutOfBlocksError":
            names.remove("PrefixCache")  # it says whose methods are meant
        listed |= {(code_in(error)[0], name) for name in names}
    listed.remove(("PoisonedError", "check"))
    assert len(listed) > 40
    assert listed == documented_errors()
