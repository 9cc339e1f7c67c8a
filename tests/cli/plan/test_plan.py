"""`pykv plan` as a user meets it: tables, JSON, pictures, help and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykv.cli.main import main
from pykv.cli.plan.arguments import OPTIONS
from pykv.planner import plan
from pykv.planner.options import DEFAULTS

NUMBERS = "--num-layers 80 --num-kv-heads 8 --head-dim 128 --num-heads 64"
TEXTBOOK = f"{NUMBERS} --weights-bytes 140GB --context 8000 --users 100"
CHAT = "llama-3.1-8b --gpu L4 --context p50=600,p90=2500,p99=7000,max=8192 --shared-prefix 200"


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *words.split()])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_one_object_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(f"{CHAT} --json", capsys)
    assert (code, err, out.count("\n")) == (0, "", 1)
    read = json.loads(out)
    needed = {
        "kv_bytes_per_token",
        "kv_bytes_at",
        "weights_bytes",
        "num_blocks",
        "requests",
        "limit",
        "levers",
    }
    needed |= {"kv_scale_bytes_per_token", "kv_to_weights", "engine_kv_bytes_per_token"}
    assert needed <= read.keys()
    assert set(read["requests"]) == {"p50", "p90", "p99", "cap", "mix"}
    options: dict[str, Any] = {
        "gpu": "L4",
        "context": "p50=600,p90=2500,p99=7000,max=8192",
        "shared_prefix": 200,
    }
    assert read == json.loads(json.dumps(plan("llama-3.1-8b", **options).to_dict()))


def test_textbook_case_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    read = json.loads(run(f"{TEXTBOOK} --json", capsys)[1])
    assert read["kv_bytes_per_token"] == 327_680
    assert read["kv_bytes_at"]["8000"] == 2_621_440_000
    assert read["users"]["kv_bytes"] == 262_144_000_000
    assert read["users"]["weights_passed_at"] == 54
    assert round(read["kv_to_weights"], 2) == 1.87


def test_tables_say_both_units_the_limit_and_the_levers(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(TEXTBOOK, capsys)[1]
    for shown in ("327,680 B", "2.62 GB (2.44 GiB)", "262 GB (244 GiB)", "1.87 × the weights", "number 54"):
        assert shown in out
    out = run(CHAT, capsys)[1]
    for shown in (
        "24.2 GB (22.5 GiB)",
        "bf16, shared prefix",
        "int8, nothing shared",
        "The limit:",
        "tensor_parallel",
    ):
        assert shown in out
    assert max(map(len, out.splitlines())) <= 110


def test_figures_that_are_not_pykvs_own_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "4,997,120 B a token, 71.1 × the formula" in run("deepseek-v3", capsys)[1]
    assert "does not serve this model" in run("AI21-Jamba-Mini-1.5", capsys)[1]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_picture_is_drawn_and_the_same_each_time(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.{ending}"
        code, _, err = run(
            f"gpt-oss-20b --gpu L40S --context p50=900,p90=9000,max=90000 --json --plot {path}", capsys
        )
        assert (code, err) == (0, f"drawn: {path}\n")
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
    if ending == "svg":
        assert b"window of 128 tokens" in drawn[0]


@pytest.mark.parametrize(
    "words", ["qwen3-8b", TEXTBOOK, "--num-layers 2 --num-kv-heads 1 --head-dim 8", "deepseek-v3"]
)
def test_picture_without_memory(tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{words} --json --plot {tmp_path}/plan.svg", capsys)[0] == 0


def test_gpus_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.1-8b --compare --users 500 --context 2000"
    out = run(words, capsys)[1]
    assert "needed" in out
    rows = json.loads(run(f"{words} --json", capsys)[1])["gpus"]
    assert len(rows) > 20
    assert all(row["gpu"] in out for row in rows)
    assert max(map(len, out.splitlines())) <= 110


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    models, gpus = run("--list models", capsys)[1].split(), run("--list gpus", capsys)[1].split()
    assert "Qwen/Qwen3-8B" in models
    assert "H100-80GB" in gpus


def test_help_shows_every_option_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in out for name in OPTIONS)
    assert set(OPTIONS) | {"model"} == set(DEFAULTS)
    examples = re.findall(r"^  pykv plan (.*)$", out, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        if "./my-model" not in example:
            assert run(example, capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lama-3.1-8b", "model is 'lama-3.1-8b'"),
        ("qwen3-8b --gpu H1000", "--gpu is 'H1000', which is not known; near ones: H100"),
        ("qwen3-8b --block-size 0", "--block-size is 0: allowed is an integer from 1 to 65536"),
        ("qwen3-8b --block-size x", "--block-size is 'x': allowed is an integer"),
        ("qwen3-8b --risk nan", "--risk is nan: allowed"),
        ("qwen3-8b --risk x", "--risk is 'x': allowed is a number"),
        ("qwen3-8b --memory 80", "--memory is '80': allowed is a size above 0 with its unit"),
        ("qwen3-8b --gpu H100 --memory 80GiB", "--gpu and --memory are both given: allowed is one of them"),
        ("qwen3-8b --num-layers 3", "model and --num-layers are both given"),
        (
            "qwen3-8b --gpus 3",
            "unrecognized arguments: --gpus 3; near ones: --num-gpus, --gpu; see pykv plan --help",
        ),
        (
            "qwen3-8b --num-gpus 3 --tensor-parallel 2",
            "--tensor-parallel is 2: allowed is a divisor of --num-gpus",
        ),
        ("llama-3.1-70b --gpu H100", "nothing is left for the KV cache"),
        ("qwen3-8b --plot x.jpg", "--plot is 'x.jpg': allowed is a file that ends with .svg or .png"),
        ("qwen3-8b --json --plot /nowhere/x.svg", "--plot is '/nowhere/x.svg', which cannot be written"),
        ("--num-layers 3", "--num-kv-heads is None"),
        (
            "--gpu H100",
            "model is not given: allowed is a folder, a config.json, a known name, or --num-layers",
        ),
        ("qwen3-8b --compare --gpu H100", "--gpu is given, but a comparison tries all"),
        ("qwen3-8b --compare --plot x.svg", "--plot is 'x.svg': allowed without --compare"),
        ("qwen3-8b --list birds", "invalid choice: 'birds'"),
        ("qwen3-8b --trace /nowhere", "--trace is '/nowhere', which cannot be read"),
    ],
)
def test_refusals_are_one_line_that_names_the_flag(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(words, capsys)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("pykv: ")


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_planning_loads_no_torch_and_json_needs_no_extra() -> None:
    blocked = ("torch", "transformers", "rich", "matplotlib", "grpclib")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from pykv.cli.main import main
main(["plan", "bundled", "--memory", "1GiB", "--json"])
"""
    assert json.loads(run_python(code))["kv_bytes_per_token"] == 23_040


@pytest.mark.parametrize(("words", "extra"), [("", "client"), ("--json --plot x.svg", "plot")])
def test_missing_extra_is_named(words: str, extra: str) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("rich", "matplotlib")))
sys.stderr = sys.stdout
from pykv.cli.main import main
print(main(["plan", "bundled", *{words.split()!r}]))
"""
    out = run_python(code)
    assert f"extra '{extra}'" in out
    assert out.rstrip().endswith("2")
