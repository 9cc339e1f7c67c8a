"""Costs out of scrapes: known ones are found again, and those of a daemon that serves are near."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykv.cli.fit import main as fit_main
from pykv.cli.main import main
from pykv.errors import ConfigError, PykvError, TraceError
from pykv.simulator.cost import CostModel
from pykv.simulator.scraped import COUNTED, fit_scrapes

pytest.importorskip("prometheus_client")

TRUTH = CostModel(fixed=0.012, per_sequence=5e-5, per_token=8e-5, per_context_token=1e-7)


def write_scrapes(folder: Path, number: int = 25, **changes: float) -> list[Path]:
    """Scrapes of a daemon under a load that changes, as its metrics would show it."""
    random = np.random.default_rng(2)
    now = dict.fromkeys(COUNTED, 0.0)
    paths = []
    for place in range(number):
        steps, running, prompt = (
            int(random.integers(*limits)) for limits in ((50, 90), (1, 60), (0, 40_000))
        )
        context = now["kv_tokens_held"]
        now["kv_tokens_held"] = float(random.integers(100, 400_000))
        context = (context + now["kv_tokens_held"]) / 2
        tokens = running + prompt / steps
        seconds = TRUTH.fixed + TRUTH.per_sequence * running + TRUTH.per_token * tokens
        seconds += TRUTH.per_context_token * context
        now["engine_steps_total"] += steps
        now["generation_tokens_total"] += steps * running
        now["prefix_cache_queries_total"] += 2 * prompt
        now["prefix_cache_hits_total"] += prompt
        now["inter_token_latency_seconds_count"] += steps * running
        now["inter_token_latency_seconds_sum"] += steps * running * seconds
        lines = [f'pykv:{name}{{model_name="m"}} {now[name] + changes.get(name, 0.0)}' for name in now]
        paths.append(folder / f"{place}.prom")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def test_known_costs_are_found_again(tmp_path: Path) -> None:
    paths = write_scrapes(tmp_path)
    found = fit_scrapes(paths[::-1])
    assert found.num_intervals == 24
    assert found.step_error_p90 < 0.01
    for part in ("fixed", "per_sequence", "per_token", "per_context_token"):
        assert getattr(found.cost_model, part) == pytest.approx(getattr(TRUTH, part), rel=0.02)


def test_the_command_writes_a_model_with_its_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_scrapes(tmp_path)
    assert main(["fit", *map(str, paths), "--output", str(tmp_path / "model.json")]) == 0
    assert "in the means of 12 intervals" in capsys.readouterr().out
    saved = json.loads((tmp_path / "model.json").read_text())
    assert saved["step_error_p50"] < 0.01
    assert CostModel.load(tmp_path / "model.json").fixed == pytest.approx(0.012, rel=0.02)


def test_the_documented_fit_runs_as_shown(
    fit_commands: Callable[[str], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scrapes").mkdir()
    write_scrapes(tmp_path / "scrapes")
    monkeypatch.chdir(tmp_path)
    (command,) = fit_commands("scrapes")
    assert len(command) > 20
    assert main(command) == 0
    assert CostModel.load(tmp_path / "served.json").fixed == pytest.approx(0.012, rel=0.02)


def test_what_is_no_scrape_is_named(tmp_path: Path) -> None:
    paths = write_scrapes(tmp_path)
    with pytest.raises(ConfigError, match="3 scrapes have 2 intervals with steps"):
        fit_scrapes(paths[:3])
    for content, message in (
        ("pykv:engine_steps_total 5\n", "pykv:generation_tokens_total is there 0 times"),
        (paths[0].read_text() * 2, "pykv:engine_steps_total is there 2 times"),
        ("{}{{{ 5", r"1.prom: (is no scrape|pykv:engine_steps_total is there 0 times)"),
    ):
        paths[1].write_text(content)
        with pytest.raises(TraceError, match=message):
            fit_scrapes(paths)
    write_scrapes(tmp_path)
    (tmp_path / "other").mkdir()
    others = write_scrapes(tmp_path / "other", engine_steps_total=30.0, generation_tokens_total=1e9)
    with pytest.raises(TraceError, match="not of one daemon"):
        fit_scrapes([*paths, *others])
    with pytest.raises(PykvError, match="num_blocks: not allowed with scrapes"):
        fit_main([*map(str, paths), "--num-blocks", "5"])
