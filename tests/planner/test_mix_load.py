"""For which loads the risk of a mix holds: what a pool holds at a random moment, against what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykv
from pykv.cli.main import main

POOL: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_blocks": 3000,
    "max_model_len": 5000,
}
RISK, DRAWS = 0.01, 4000
BY_OUTPUT = [(100, 4900)] * 1 + [(100, 100)] * 9
BY_PROMPT = [(4900, 100)] * 1 + [(100, 100)] * 9


def passing(requests: list[tuple[int, int]], users: int) -> float:
    """How often so many users, each of whom always has a request running, hold more than the pool."""
    random = np.random.default_rng(3)
    prompts, outputs = np.array(requests).T
    running = random.choice(len(requests), size=(DRAWS, users), p=outputs / outputs.sum())
    written = np.floor(random.random((DRAWS, users)) * outputs[running]) + 1
    blocks = np.ceil((prompts[running] + written) / 16).sum(axis=1)
    return float((blocks > POOL["num_blocks"] - 1).mean())


def histogram(requests: list[tuple[int, int]], folder: Path) -> Path:
    path = folder / "lengths.csv"
    path.write_text("".join(f"{prompt + output},1\n" for prompt, output in requests))
    return path


def trace(requests: list[tuple[int, int]], folder: Path) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({"ts": 0, "in": i, "out": o}) + "\n" for i, o in requests))
    return path


def test_a_histogram_holds_for_requests_that_are_long_by_their_prompts(tmp_path: Path) -> None:
    planned = pykv.plan(**POOL, histogram=histogram(BY_PROMPT, tmp_path), risk=RISK)
    assert planned.requests is not None
    assert passing(BY_PROMPT, planned.requests["mix"]) <= RISK + 0.005


def test_a_histogram_does_not_hold_for_long_outputs_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = histogram(BY_OUTPUT, tmp_path)
    planned = pykv.plan(**POOL, histogram=path, risk=RISK)
    assert planned.requests is not None
    assert passing(BY_OUTPUT, planned.requests["mix"]) > 0.9
    assert planned.mix_assumes is not None
    assert "equally long" in planned.mix_assumes
    assert planned.to_dict()["mix_assumes"] == planned.mix_assumes
    by_hand = ["--num-layers", "2", "--num-kv-heads", "2", "--head-dim", "8", "--num-blocks", "3000"]
    assert main(["plan", *by_hand, "--max-model-len", "5000", "--histogram", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The risk of the mix, 1.0%, is for a load in which {planned.mix_assumes}." in shown


@pytest.mark.parametrize("requests", [BY_OUTPUT, BY_PROMPT], ids=["output", "prompt"])
def test_a_trace_holds_for_both(requests: list[tuple[int, int]], tmp_path: Path) -> None:
    planned = pykv.plan(**POOL, trace=trace(requests, tmp_path), risk=RISK)
    assert planned.requests is not None
    assert passing(requests, planned.requests["mix"]) <= RISK + 0.005
    assert planned.mix_assumes is not None
    assert "as the trace has them" in planned.mix_assumes


def test_requests_of_one_length_need_no_such_word() -> None:
    assert pykv.plan(**POOL, context=600).mix_assumes is None
    assert pykv.plan(**POOL, context="p50=600,max=900").mix_assumes is not None
