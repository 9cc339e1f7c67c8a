"""A fitted model predicts the run that it was fitted to, and measured runs of vLLM."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykv.cli.main import main
from pykv.errors import ConfigError, TraceError
from pykv.scheduler import SchedulerConfig
from pykv.simulator.cost import CostModel
from pykv.simulator.fit import fit
from pykv.simulator.measured_run import read_measured_run
from pykv.simulator.trace import read_trace

TRUTH = CostModel(fixed=0.012, per_sequence=5e-5, per_token=8e-5, per_context_token=1e-7)


@pytest.fixture
def simulated_run(tmp_path: Path) -> Path:
    """A run whose costs are known: a replay, written down as if it had been measured."""
    rng = np.random.default_rng(1)
    lengths = [(int(rng.integers(50, 900)), int(rng.integers(5, 200))) for _ in range(40)]
    arrivals = np.cumsum(rng.exponential(0.1, 40))
    rows = [
        {"input_toks": prompt, "output_toks": output, "arrival_time": 1000 + arrival}
        for (prompt, output), arrival in zip(lengths, arrivals.tolist(), strict=True)
    ]
    path = tmp_path / "run.requests.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = SchedulerConfig(
        num_blocks=601, watermark=0.0, admission="watermark", enable_prefix_caching=False, max_num_seqs=32
    )
    timed = read_trace(path).native.replay_timed(
        config, TRUTH, allocator="paged", knows_outputs=False, retention="none", speed=1.0, concurrency=None
    )
    first, ended = timed.request_column("first_token"), timed.request_column("ended")
    for row, arrival, first_token, last_token in zip(
        rows, timed.request_column("arrival"), first, ended, strict=True
    ):
        row |= {"queued_ts": arrival, "first_token_ts": first_token, "last_token_ts": last_token}
    path.write_text("\n".join(map(json.dumps, rows)))
    meta = {"engine_kwargs": {"max_num_seqs": 32}, "kv_cache": {"num_gpu_blocks": 601, "block_size": 16}}
    (tmp_path / "run.meta.json").write_text(json.dumps(meta))
    usage = np.array(timed.point_column("reserved_slots")) / (600 * 16)
    samples = zip(timed.point_column("start"), timed.point_column("running"), 100 * usage, strict=True)
    lines = ["t,running,kv_cache_pct", *(f"{time},{running},{percent}" for time, running, percent in samples)]
    (tmp_path / "run.timeseries.csv").write_text("\n".join(lines))
    return path


def test_the_documented_fit_and_replay_run_as_shown(
    simulated_run: Path,
    fit_commands: Callable[[str], list[list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "RTX4090_Llama-3.1-8B"
    packed = tmp_path / f"{name}.requests.jsonl.gz"
    packed.write_bytes(gzip.compress(simulated_run.read_bytes()))
    for kind in ("meta.json", "timeseries.csv"):
        (tmp_path / f"run.{kind}").rename(tmp_path / f"{name}.{kind}")
    (tmp_path / "examples").symlink_to(Path(__file__).parents[2] / "examples")
    monkeypatch.chdir(tmp_path)
    commands = fit_commands("RTX4090")
    assert [command[0] for command in commands] == ["fit", "replay"]
    for command in commands:
        assert main(command) == 0
    assert CostModel.load(tmp_path / "rtx4090.json").fixed == pytest.approx(TRUTH.fixed, rel=0.2)


def test_known_costs_are_found_again(simulated_run: Path) -> None:
    report = fit(read_measured_run(simulated_run))
    assert abs(report.latency_median_error) < 0.05
    assert abs(report.duration_error) < 0.05
    assert report.kv_usage_error is not None
    assert report.kv_usage_error < 0.05
    model, batch = report.cost_model, {"sequences": 20, "tokens": 20, "context": 8000}
    predicted, true = (
        cost.fixed
        + cost.per_sequence * batch["sequences"]
        + cost.per_token * batch["tokens"]
        + cost.per_context_token * batch["context"]
        for cost in (model, TRUTH)
    )
    assert predicted == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("name", ["RTX4090_Llama-3.1-8B", "RTXPRO6000_Qwen3-32B"])
def test_measured_runs_of_vllm_are_predicted_within_a_tenth(name: str, public_traces: Path) -> None:
    report = fit(read_measured_run(public_traces / "vllm_runs" / f"{name}.requests.jsonl.gz"))
    assert abs(report.latency_median_error) < 0.10
    assert abs(report.ttft_median_error) < 0.10
    assert abs(report.tpot_median_error) < 0.10
    assert abs(report.duration_error) < 0.10
    assert report.request_error_p90 < 0.10
    assert (report.kv_usage_error is None) == ("RTXPRO6000" in name)
    assert (report.kv_usage_error or 0) < 0.05


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.5, 10**9])
def test_a_pool_that_is_none_is_refused(num_blocks: int, simulated_run: Path) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}: allowed is an integer from 1 to"):
        fit(read_measured_run(simulated_run), num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"queued_ts": None}, "line 1: queued_ts is None"),
        ({"first_token_ts": -1.0}, "line 1: queued_ts, first_token_ts, last_token_ts"),
        ({"output_toks": 1.5}, "line 1: output_toks is 1.5"),
    ],
)
def test_what_was_not_measured_is_named(row: dict[str, object], message: str, tmp_path: Path) -> None:
    whole = {"input_toks": 5, "output_toks": 5, "arrival_time": 1.0, "queued_ts": 0.0}
    whole |= {"first_token_ts": 1.0, "last_token_ts": 2.0}
    path = tmp_path / "run.requests.jsonl"
    path.write_text(json.dumps(whole | row))
    with pytest.raises(TraceError, match=message):
        read_measured_run(path)
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="the run has 1 requests"):
        fit(read_measured_run(path))
    (tmp_path / "run.timeseries.csv").write_text("t,running\n1,2\n")
    with pytest.raises(TraceError, match="line 2: kv_cache_pct is None"):
        read_measured_run(path)
