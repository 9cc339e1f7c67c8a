"""The tables of docs/quality.md are those of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pykv.quality.evaluation import CacheQuality
from pykv.quality.report import table

ROOT = Path(__file__).parents[2]


def stored(name: str) -> list[CacheQuality]:
    by_format: dict[str, dict[str, float]] = {}
    for line in (ROOT / "benches" / "results" / name).read_text().splitlines():
        entry = json.loads(line)
        by_format.setdefault(entry["case"], {"num_tokens": entry["n"]})[entry["metric"]] = entry["value"]
    return [CacheQuality(kv_dtype=case, **values) for case, values in by_format.items()]


@pytest.mark.parametrize(("name", "reference"), [("quality.jsonl", "bf16"), ("quality_float32.jsonl", "f32")])
def test_a_table_is_that_of_the_stored_results(name: str, reference: str) -> None:
    results = stored(name)
    assert results[0].kv_dtype == reference
    assert len(results) == 5
    assert min(each.num_tokens for each in results) >= 20_000
    assert table(results) in (ROOT / "docs" / "quality.md").read_text()
