"""A config that can be no model's, and requests that can be nobody's, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pykv
from pykv.errors import TraceError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("num_kv_heads", [3, 16])
def test_kv_heads_that_query_heads_cannot_share_are_refused(num_kv_heads: int) -> None:
    with pytest.raises(
        pykv.ConfigError, match=f"num_kv_heads is {num_kv_heads}: allowed is a divisor of num_heads"
    ):
        pykv.plan({**CONFIG, "num_key_value_heads": num_kv_heads}, memory="80GiB")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**30, "num_hidden_layers is 10+:"),
        ("num_hidden_layers", 10**9, "the config has 1000000000 layers"),
        ("num_attention_heads", 10**9, "1000000000 heads share a hidden size of 4096"),
        ("num_attention_heads", [8], "num_query_heads lists 1 layers, of which 1 is none"),
        ("num_key_value_heads", [8], "num_kv_heads lists 1 layers, of which 1 is none"),
        ("max_position_embeddings", 10**30, "max_position_embeddings is 10+:"),
    ],
)
def test_numbers_that_are_no_models_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(pykv.PykvError, match=message):
        pykv.plan({**CONFIG, field: value}, memory="80GiB", context=1000)


@pytest.mark.parametrize("context", [20, "p50=10,max=20"])
def test_a_prefix_above_every_context_is_refused(context: Any) -> None:
    pykv.plan(CONFIG, memory="80GiB", context=context, shared_prefix=20)
    with pytest.raises(
        pykv.ConfigError, match="shared_prefix is 21: allowed is at most the longest context, which is 20"
    ):
        pykv.plan(CONFIG, memory="80GiB", context=context, shared_prefix=21)


@pytest.mark.parametrize("ts", ["NaN", "Infinity", '"noon"', "true"])
def test_a_trace_without_times_is_refused(ts: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(f'{{"ts": {ts}, "in": 5, "out": 1}}\n')
    with pytest.raises(TraceError, match=r"line 1: ts is .*: allowed is a finite number"):
        pykv.plan(CONFIG, memory="80GiB", trace=tmp_path / "trace.jsonl")


def test_a_plan_says_which_watermark_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    from pykv.cli.main import main

    command = ["plan", "llama-3.1-8b", "--gpu", "L4", "--context", "600"]
    assert main(command) == 0
    assert "planned with a watermark of 0; an engine's default, 0.01," in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*command, "--watermark", "0.01"]) == 0
    assert "watermark" not in capsys.readouterr().out
