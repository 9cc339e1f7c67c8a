"""`pykv replay` and `pykv fit` as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pykv.cli.main import main
from pykv.cli.replay_report import DASH

TRACES = Path(__file__).parents[2] / "examples/traces"
AGENTS = str(TRACES / "agents.jsonl")
HEAVY = ("torch", "transformers", "grpclib", "matplotlib")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["replay", *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_the_hit_rates_and_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, AGENTS, "--serial", "--num-blocks", "12%", "--policy", "lru", "--json"))
    assert shown["hit_rate_blocks"] < shown["hit_rate_opt"] < shown["hit_rate_infinite"]
    assert 0 < shown["hit_rate_tokens"] < 1
    assert "ttft_p50" not in shown


def test_timed_json_has_percentiles_and_series_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, AGENTS, "--num-blocks", "500", "--json"))
    assert {"ttft_p99", "tpot_p50", "queue_p90", "waste", "lookups_evicted", "preemptions"} <= set(shown)
    assert "series" not in shown
    assert (
        len(json.loads(run(capsys, AGENTS, "--num-blocks", "500", "--json", "--series"))["series"]["running"])
        > 100
    )


def test_a_sweep_prints_a_line_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "num_blocks=5%,12%,policy=lru,opt"]
    lines = run(capsys, AGENTS, "--serial", *sweep, "--json").splitlines()
    assert [json.loads(line)["policy"] for line in lines] == ["lru", "opt", "lru", "opt"]
    table = run(capsys, AGENTS, "--serial", *sweep).splitlines()
    assert len(table) == 5
    assert table[0].split() == ["num_blocks", "policy", "hit", "rate", "best"]


def test_memory_may_be_given_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--serial",
        "--kv-memory-bytes",
        "1GiB",
        "--model",
        "llama-3.1-8b",
        "--sweep",
        "kv_dtype=bfloat16,int8",
        "--json",
    ]
    blocks = [json.loads(line)["num_blocks"] for line in run(capsys, AGENTS, *arguments).splitlines()]
    assert blocks == [2**30 // (131_072 * 64), 2**30 // ((65_536 + 2_048) * 64)]


def test_a_policy_comes_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def rank(self, use):\n        return use.request\n")
    arguments = [AGENTS, "--serial", "--num-blocks", "300", "--json"]
    mine, lru = (
        json.loads(run(capsys, *arguments, *policy)) for policy in (["--policy", f"{path}:Mine"], [])
    )
    assert mine.pop("policy") == "Mine"
    assert lru.pop("policy") == "lru"
    assert mine == lru


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "--num-blocks", "9"], "trace missing.jsonl: No such file"),
        ([AGENTS], "neither of num_blocks and kv_memory_bytes is given: allowed is one"),
        (
            [AGENTS, "--num-blocks", "9", "--serial", "--policy", "nowhere.py:X"],
            "nowhere.py is no Python file",
        ),
        ([AGENTS, "--num-blocks", "9", "--serial", "--policy", f"{__file__}:X"], "defines no X"),
        ([AGENTS, "--num-blocks", "9", "--sweep", "colour=red"], "'colour=red' is no OPTION=A,B"),
        (
            [AGENTS, "--num-blocks", "9", "--sweep", "speed=fast"],
            "sweep: speed is 'fast': allowed is a number",
        ),
        (
            [AGENTS, "--num-blocks", "900", "--plot", "no/such/folder.svg"],
            "--plot is 'no/such/folder.svg', which cannot be written: there is no folder no/such",
        ),
        # Before the trace is looked at.
        (
            ["missing.jsonl", "--num-blocks", "9", "--plot", "x.jpg"],
            "--plot is 'x.jpg': allowed is a file that ends",
        ),
        (
            [AGENTS, "--num-blocks", "9", "--serial", "--plot", "x.svg"],
            "one serial replay has nothing to draw",
        ),
        ([AGENTS, "--num-blocks", "9", "--series"], "series: not allowed without json"),
        ([AGENTS, "--num-blocks", "9", "--seed", "-1"], "seed is -1"),
        (
            [AGENTS, "--num-blocks", "abc"],
            "--num-blocks is 'abc': allowed is an integer, or a share such as 10%; see pykv replay --help",
        ),
        ([AGENTS, "--num-blocks", "9", "--speed", "fast"], "--speed is 'fast': allowed is a number; see"),
        (
            [AGENTS, "--num-blocks", "9", "--kv-memory-bytes", "1GiB"],
            "both of num_blocks and kv_memory_bytes",
        ),
        ([AGENTS, "--kv-memory-bytes", "many"], "kv_memory_bytes is 'many': allowed is a size"),
        ([], "required: TRACE; see pykv replay --help"),
    ],
)
def test_a_refusal_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_fit_writes_a_model_that_replay_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {
            "input_toks": 100 + i,
            "output_toks": 10,
            "arrival_time": float(i),
            "queued_ts": float(i),
            "first_token_ts": i + 0.1,
            "last_token_ts": i + 0.55,
        }
        for i in range(8)
    ]
    run_path, model = tmp_path / "run.requests.jsonl", tmp_path / "model.json"
    run_path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["fit", str(run_path), "--output", str(model)]) == 0
    assert "KV use    not measured" in capsys.readouterr().out
    assert json.loads(model.read_text())["num_requests"] == 8
    shown = json.loads(run(capsys, str(run_path), "--num-blocks", "99", "--cost", str(model), "--json"))
    assert shown["latency_p50"] == pytest.approx(0.55, rel=0.1)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Mine: pass", "an object with a method rank"),
        (
            "class Mine:\n def __init__(self, size): pass\n def rank(self, use): return 0",
            "missing a required argument",
        ),
        ("Mine = 3", "is not a callable object"),
    ],
)
def test_a_policy_that_is_none_is_refused(
    code: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    arguments = [AGENTS, "--serial", "--num-blocks", "9", "--policy", f"{tmp_path / 'mine.py'}:Mine"]
    assert main(["replay", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_replay_in_which_nothing_ran_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", AGENTS, "--num-blocks", "1"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert f"hit rate        {DASH}" in shown
    assert "requests were refused: none fits" in shown
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["refused"] == found["num_requests"]
    assert found["ttft_p50"] is found["latency_mean"] is found["waste"] is None
    assert main(["replay", AGENTS, "--sweep", "num_blocks=1,2"]) == 1
    heads, *rows = capsys.readouterr().out.splitlines()
    assert "refused" in heads
    assert all(DASH in row for row in rows)
    assert main(["replay", AGENTS, "--sweep", "num_blocks=1,500"]) == 0


@pytest.mark.parametrize("module", ["pykv", "pykv.cli.main"])
def test_the_program_runs_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "replay", AGENTS, "--serial", "--num-blocks", "9", "--json"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(shown)["num_blocks"] == 9
    refused = subprocess.run([*command[:3], "fly"], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("pykv: 'fly' is no command")


def test_replay_brings_no_heavy_module() -> None:
    code = (
        "import sys; from pykv.cli.main import main;"
        f"main(['replay', {AGENTS!r}, '--num-blocks', '500']);"
        f"sys.exit(bool(set(sys.modules) & set({HEAVY!r})))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_long_replay_ends_at_once_when_interrupted(tmp_path: Path) -> None:
    row = json.dumps({"ts": 0, "in": 5, "out": 50_000_000, "s": None, "h": None})
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"name": "long", "block_size": None}) + "\n" + row + "\n")
    code = (
        "import os, signal, threading; from pykv.simulator.replay import Replayer;"
        "from pykv.simulator.trace import read_trace;"
        f"replayer = Replayer(read_trace({str(path)!r}));"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start();"
        "replayer.run(num_blocks=4_000_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
