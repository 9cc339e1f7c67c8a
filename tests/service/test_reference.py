"""docs/reference.md has every option of `pykv-serve` and every metric of the daemon, as the code says them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pykv.service.options import ServeOptions
from pykv.service.options.table import group_of, help_of, kind_of
from pykv.service.transport.offence import Offence
from pykv.service.wire_check import FIELDS_LIMIT

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference.md"


def option_rows():
    """A row of each option, in the help's order."""
    for entry in fields(ServeOptions):
        flag, kind = "--" + entry.name.replace("_", "-"), kind_of(entry)
        value = "" if kind.placeholder == "BOOL" else f" {kind.placeholder}"
        yield _row(f"`{flag}{value}`", group_of(entry), help_of(entry))


def metric_rows(families):
    """A row of each metric, by its name."""
    for family in sorted(families, key=lambda family: family.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in family._labelnames)
        yield _row(f"`{name}`", family.type, labels, family.documentation)


def _row(*cells):
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def written_rows(heading):
    section = REFERENCE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `.*$", section, re.MULTILINE)
    assert len(rows) > 20
    return rows


def test_every_option_is_in_the_reference_as_the_help_has_it():
    assert written_rows("Options") == list(option_rows())


@pytest.mark.asyncio
async def test_every_metric_is_in_the_reference_as_the_daemon_tells_it(start_tls):
    collector = (await start_tls()).daemon._collector
    collector.count_replays_refused(lambda: 0)  # as with --kv-events-zmq-replay
    families = list(collector.collect())
    assert written_rows("Metrics") == list(metric_rows(families))


def test_the_page_for_operators_leads_there_and_names_what_there_is():
    text = (ROOT / "docs" / "operate.md").read_text()
    assert "](reference.md)" in text
    assert "](reference.md#metrics)" in text
    told = set(re.findall(r"`(pykv:\w+)", text))
    assert len(told) > 10
    assert told <= set(re.findall(r"`(pykv:\w+)`", REFERENCE.read_text()))
    (row,) = re.findall(r"^.*`pykv:connections_closed_total` by `reason`(.*)\|.*\|$", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {offence.label for offence in Offence}


def test_both_pages_say_how_many_fields_a_request_may_hold():
    for page in ("operate.md", "api.md"):
        assert f"{FIELDS_LIMIT:,} fields" in (ROOT / "docs" / page).read_text()
