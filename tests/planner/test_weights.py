"""The bytes of weights: of files, of parameters, and as estimated by a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pykv import ModelError
from pykv.planner import plan
from pykv.planner.parameters import Parameters, estimate_parameters
from pykv.planner.tables import known_model, model_names
from pykv.planner.weights import bytes_of_parameters

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
}
TENSOR_BYTES = 4096


def write_folder(folder: Path, shards: int = 1, **more: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"} | more))
    names = (
        [f"model-{index:05}-of-{shards:05}.safetensors" for index in range(shards)]
        if shards > 1
        else ["model.safetensors"]
    )
    for name in names:
        head = b'{"x":{"dtype":"BF16","shape":[2048],"data_offsets":[0,4096]}}'
        (folder / name).write_bytes(len(head).to_bytes(8, "little") + head + bytes(TENSOR_BYTES))
    if shards > 1:
        index = {"weight_map": {f"x{number}": name for number, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", model_names())
def test_estimate_is_near_for_every_shipped_model(name: str) -> None:
    _, entry = known_model(name)
    estimated = estimate_parameters(entry["config"])
    assert estimated.total == pytest.approx(entry["num_parameters"], rel=0.04)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        ("float32", 4000),
        ("bfloat16", 2000),
        ("fp8", 1000 + 100),
        ("int4", 668),
        ("mxfp4", 679),
        ("nvfp4", 707),
    ],
)
def test_embedding_stays_in_16_bits_below_16(dtype: str, num_bytes: int) -> None:
    assert bytes_of_parameters(Parameters(1000, 100), dtype) == num_bytes


def test_weights_of_a_folder_are_its_tensors(tmp_path: Path) -> None:
    one, several = write_folder(tmp_path / "one"), write_folder(tmp_path / "several", shards=3)
    (several / "consolidated.safetensors").write_bytes(bytes(10_000))
    assert plan(one).weights_bytes == TENSOR_BYTES
    assert plan(several).weights_bytes == 3 * TENSOR_BYTES
    assert plan(one).model == "one"


def test_folder_in_another_dtype_counts_its_parameters(tmp_path: Path) -> None:
    found = plan(write_folder(tmp_path / "one"), weights_dtype="float32")
    assert found.weights_bytes == 2 * TENSOR_BYTES
    assert found.weights_source == "2,048 parameters, by the size of the files"


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_quantized_config_is_taken_as_published(quantization: dict[str, Any], dtype: str) -> None:
    found = plan(LLAMA | {"quantization_config": quantization})
    assert found.weights_dtype == dtype
    assert found.weights_source is not None
    assert "an estimate by the config" in found.weights_source


def test_unknown_quantization_asks_for_the_dtype() -> None:
    with pytest.raises(ValueError, match="weights_dtype is None: allowed"):
        plan(LLAMA | {"quantization_config": {"quant_method": "strange"}})


def test_given_weights_come_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "one")
    assert plan(folder, weights_bytes="1GB").weights_bytes == 10**9
    assert plan(folder, num_parameters=1000, weights_dtype="float32").weights_bytes == 4000
    assert plan("gpt-oss-120b").weights_bytes == 65_248_815_744
    assert plan("deepseek-r1").weights_dtype == "fp8"


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cut", shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-00001-of-00002\.safetensors, which is not there"):
        plan(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="is no index of weights"):
        plan(folder)
    other = write_folder(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="is no safetensors file"):
        plan(other)


def test_config_object_of_transformers_is_a_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "llama", **{k: v for k, v in LLAMA.items() if k != "model_type"}
    )
    assert plan(config).kv_bytes_per_token == plan(LLAMA).kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
