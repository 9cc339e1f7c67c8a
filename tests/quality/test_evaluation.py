"""The evaluation of cache formats: what it counts, and how its results are shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pykv.cli.main import main
from pykv.errors import ConfigError
from pykv.models import load_model
from pykv.quality.evaluation import CacheQuality, Evaluation, _same_beginning, evaluate
from pykv.quality.report import draw, json_lines, table
from pykv.quality.text import shipped_text

RESULTS = [
    CacheQuality("bf16", 23_040, 100, 20.0, 0.0, 1.0, 1.0),
    CacheQuality("int8", 12_240, 100, 20.01, 0.0005, 0.987, 0.75),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return load_model((LlamaForCausalLM(config).eval(), None))[0]


def test_the_text_is_long_and_plain():
    text = shipped_text()
    assert text.startswith("ALICE'S ADVENTURES IN WONDERLAND\n\nLewis Carroll\n\nCHAPTER I\n\n")
    assert text.endswith("THE END\n")
    assert len(text) == 143_219
    assert text.isascii()


def test_the_text_is_cut_into_whole_pieces():
    evaluation = Evaluation(range(10), context=4)
    assert evaluation.pieces() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert evaluation.passages() == evaluation.pieces()


@torch.inference_mode()
def test_the_perplexity_is_that_of_the_model_itself(model):
    evaluation = Evaluation([(7 * place * place + 3) % 101 for place in range(80)], context=40)
    exact, rounded, narrow = evaluate(model, evaluation, ["f32", "bf16", "int8"])
    losses = []
    model.module.set_attn_implementation("eager")
    for piece in evaluation.pieces():
        tokens = torch.tensor([piece])
        logits = model.module(tokens, use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    model.module.set_attn_implementation("pykv")
    assert exact.perplexity == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-5)
    assert (exact.num_tokens, exact.perplexity_change, exact.same_best, exact.same_greedy) == (78, 0, 1, 1)
    assert [each.bytes_per_token for each in (exact, rounded, narrow)] == [256, 128, 8 * 12]
    for other in (rounded, narrow):
        assert other.perplexity_change == pytest.approx(other.perplexity / exact.perplexity - 1)
        assert 0 < abs(other.perplexity_change) < 0.05


def test_a_continuation_counts_until_it_first_differs():
    assert _same_beginning([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert _same_beginning([1, 9, 3, 4], [1, 2, 3, 4]) == 0.25
    assert _same_beginning([9, 2, 3, 4], [1, 2, 3, 4]) == 0.0


def test_an_unknown_format_is_refused_before_anything_runs(model):
    with pytest.raises(ConfigError, match="kv_dtype is 'int3'"):
        next(evaluate(model, Evaluation(range(80), 40), ["f32", "int3"]))


def test_results_are_lines_of_json_and_a_table():
    lines = [json.loads(line) for line in json_lines(RESULTS[1])]
    assert lines[2] == {
        "bench": "eval-cache",
        "case": "int8",
        "metric": "perplexity_change",
        "value": 0.0005,
        "unit": "ratio",
        "n": 100,
    }
    assert table(RESULTS).splitlines()[-1] == "| int8 | 12,240 | 20.0100 | +0.050% | 98.70% | 75.0% |"


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_results_are_drawn(tmp_path, name):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    draw(RESULTS, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "bf16,int3"], "kv_dtype is 'int3'"),
        (["--attention-backend", "magic"], "attention_backend is 'magic': allowed are 'auto', 'torch', "),
        (["--text", "/nowhere/text"], "--text is '/nowhere/text', which cannot be read"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, message):
    assert main(["eval-cache", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"pykv: {message}")


def test_the_command_prints_json_for_a_folder(tmp_path, capsys, save_word_model):
    save_word_model(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * place) % 90 + 2}" for place in range(130)))
    arguments = ["--model", str(tmp_path), "--text", str(text), "--context", "60", "--formats", "f32,fp8"]
    assert main(["eval-cache", *arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["case"] for line in lines} == {"f32", "fp8"}
    assert {line["n"] for line in lines} == {2 * 59}


@pytest.fixture
def save_word_model():
    def save(folder: Path):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {f"w{index}": index for index in range(101)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        torch.manual_seed(2)
        config = LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
        LlamaForCausalLM(config).save_pretrained(folder)

    return save
