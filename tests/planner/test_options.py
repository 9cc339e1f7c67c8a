"""Options that are unknown, not allowed or contradictory are refused by name, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pykv import ConfigError, ModelError, UnsupportedModelError
from pykv.planner import plan

NUMBERS: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 16}, "block_sise is no option of a plan; near ones: block_size"),
        ({"block_size": 0}, "block_size is 0: allowed is an integer from 1 to 65536"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": 1.5}, "block_size is 1.5"),
        ({"num_blocks": 1}, "num_blocks is 1: allowed is an integer from 2"),
        ({"num_blocks": 2**40}, "num_blocks is"),
        ({"kv_dtype": "fp7"}, "kv_dtype is 'fp7': allowed is one of f32, bf16, f16, int8, fp8"),
        (
            {"kv_scales": "tensor"},
            "kv_scales is 'tensor': allowed is with a kv_dtype that has scales; bf16 has none",
        ),
        ({"kv_scales": "row"}, "kv_scales is 'row': allowed is one of token_head, tensor"),
        ({"weights_dtype": "int3"}, "weights_dtype is 'int3': allowed is one of float32"),
        ({"storage": "best"}, "storage is 'best': allowed is one of engine, formula"),
        ({"risk": 0}, "risk is 0: allowed is a number above 0 and below 1"),
        ({"risk": float("nan")}, "risk is nan"),
        ({"utilization": 1.1}, "utilization is 1.1: allowed is a number above 0 and at most 1"),
        ({"utilization": -1}, "utilization is -1"),
        ({"utilization": float("inf")}, "utilization is inf"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": "1"}, "watermark is '1'"),
        ({"memory": "80"}, "memory is '80': allowed is a size above 0 with its unit"),
        ({"memory": "80 gigs"}, "memory is '80 gigs'"),
        ({"memory": "-80GiB"}, "memory is '-80GiB'"),
        ({"memory": "0GiB"}, "memory is '0GiB'"),
        ({"memory": "nanGiB"}, "memory is 'nanGiB'"),
        ({"memory": "9e99GiB"}, "memory is '9e99GiB'"),
        ({"memory": 0}, "memory is 0"),
        ({"memory": 80.0}, "memory is 80.0"),
        ({"memory": ["80GiB", "40GiB"]}, "memory is .*allowed is one size, or one for each of the 1 GPUs"),
        ({"reserve": "-1GiB"}, "reserve is '-1GiB'"),
        ({"gpu": "H1000"}, "gpu is 'H1000', which is not known; near ones: H100"),
        ({"gpu": ""}, "gpu is ''"),
        ({"gpu": "H100", "memory": "80GiB"}, "gpu and memory are both given: allowed is one of them"),
        ({"memory": "80GiB", "num_blocks": 9}, "memory and num_blocks are both given"),
        (
            {"num_parameters": "8B", "weights_bytes": "16GB"},
            "num_parameters and weights_bytes are both given",
        ),
        ({"num_parameters": "8 billion"}, "num_parameters is '8 billion': allowed is a number above 0"),
        ({"num_parameters": float("nan")}, "num_parameters is nan"),
        ({"num_parameters": -5}, "num_parameters is -5"),
        ({"context": 5, "trace": "x"}, "context and trace are both given"),
        ({"context": 5, "histogram": "x"}, "context and histogram are both given"),
        ({"trace": 5}, "trace is 5: allowed is the path of a file"),
        ({"users": 0}, "users is 0"),
        ({"shared_prefix": -1}, "shared_prefix is -1"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"model": "llama-3.1-8b"}, "model and num_layers are both given"),
        ({"num_heads": 3}, "num_kv_heads is 2: allowed is a divisor of num_heads, which is 3"),
        ({"latent_dim": 5}, "latent_dim and num_kv_heads are both given"),
        ({"latent_dim": 5, "num_kv_heads": None}, "latent_dim and head_dim are both given"),
        (
            {"num_window_layers": 1},
            "window is None: allowed is a whole number above 0, as num_window_layers is given",
        ),
        (
            {"num_window_layers": 3, "window": 5},
            "num_window_layers is 3: allowed is at most num_layers, which is 2",
        ),
        ({"head_dim": 10**9}, "head_dim is 1000000000: allowed is at most 65,536"),
        ({"num_layers": 10**9}, "num_layers is 1000000000: allowed is at most 10,000"),
        ({"state_bytes": "x"}, "state_bytes is 'x'"),
        ({"memory": "80GiB"}, "num_parameters is None: allowed is a number such as 70.6B"),
    ],
)
def test_option_that_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**NUMBERS | options)


def test_sizes_beyond_every_machine_are_refused() -> None:
    huge = {"num_layers": 10_000, "num_kv_heads": 65_536, "head_dim": 65_536}
    with pytest.raises(ConfigError, match=r"less than 2\*\*60 bytes"):
        plan(**huge, context=2**30)


@pytest.mark.parametrize("missing", ["num_layers", "num_kv_heads", "head_dim"])
def test_numbers_that_are_missing_are_named(missing: str) -> None:
    given = {name: value for name, value in NUMBERS.items() if name != missing}
    with pytest.raises(ConfigError, match=f"{missing} is None"):
        plan(**given)


@pytest.mark.parametrize("name", ["x" * 9999, "a\0b", "/" + "x" * 9999])
def test_a_name_that_no_file_can_have_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model is .*, which is neither a folder, nor a file") as caught:
        plan(name)
    assert len(str(caught.value)) < 300


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match="model is not given: allowed is a folder"):
        plan(gpu="H100")
    with pytest.raises(ConfigError, match="model is 5"):
        plan(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lama-3.1-8b", "Llama-3.1-8B"),
        ("qwen3-7b", "Qwen3-"),
        ("gpt-oss", "gpt-oss-20b"),
        ("deepseek-v4", "DeepSeek-V3"),
    ],
)
def test_unknown_model_names_near_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"model is '{name}'.*near ones: .*{near}"):
        plan(name)


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.1-8b",
        "LLAMA 3.1 8B",
        "Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B",
    ],
)
def test_known_model_by_many_spellings(name: str) -> None:
    assert plan(name).model == "meta-llama/Meta-Llama-3.1-8B"


def test_gpu_by_many_spellings() -> None:
    totals = {plan("qwen3-8b", gpu=name).budget for name in ("H100", "h100-80gb", "H100 80GB", "H100-SXM")}
    assert len(totals) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is no JSON"),
        ("[1]", "whose JSON is no object but a list"),
        ("{}", "none of the fields num_hidden_layers"),
        ('{"num_hidden_layers": 1, "num_attention_heads": 0, "hidden_size": 8}', "num_attention_heads is 0"),
        ('{"num_hidden_layers": -1}', "num_hidden_layers is -1"),
        ('{"num_hidden_layers": 1, "num_attention_heads": 4}', "none of the fields hidden_size"),
        ('{"num_hidden_layers": 1, "layer_types": ["odd"]}', "layer 0 is 'odd'"),
    ],
)
def test_config_that_is_malformed(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for model in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        with pytest.raises((ModelError, UnsupportedModelError), match=message):
            plan(model)


def test_folder_and_file_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a folder without a config\.json"):
        plan(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"give its config\.json"):
        plan(tmp_path / "model.gguf")


def test_fewer_bytes_than_two_blocks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="block_size is 65536: allowed is blocks of which two fit"):
        plan("llama-3.1-8b", gpu="L4", block_size=65_536)
