"""Packed linear layers: the same results, no second copy of the weights, and nothing where it would be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pykv.models import load_model
from pykv.models.acceleration import pack_linears
from pykv.models.packed_linear import PackedLinear, can_pack

DTYPES = [torch.float32, torch.bfloat16]


def is_packed(layer: nn.Module) -> bool:
    return isinstance(getattr(layer.forward, "__self__", None), PackedLinear)


def make_pair(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 192), nn.Linear(192, 128, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(128,), (1, 128), (1, 0, 128), (1, 3, 128), (2, 40, 128)])
def test_packed_layers_give_the_plain_results(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    plain, packed = make_pair(dtype), make_pair(dtype)
    assert pack_linears(packed, lambda: True) == 2
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        found, expected = packed(inputs), plain(inputs)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_plain_weights_are_given_up_and_keep_their_shape() -> None:
    pair = make_pair(torch.float32)
    pack_linears(pair, lambda: True)
    for layer in pair:
        assert is_packed(layer)
        assert layer.weight.shape == (layer.out_features, layer.in_features)
        assert layer.weight.untyped_storage().nbytes() == 4
        assert layer.weight.isnan().all()


def test_weight_that_another_layer_uses_stays() -> None:
    embedding = nn.Embedding(256, 128)
    head = nn.Linear(128, 256, bias=False)
    head.weight = embedding.weight
    tied = nn.ModuleList([embedding, head]).requires_grad_(False)
    expected = embedding(torch.tensor([3])).clone()
    assert pack_linears(tied, lambda: True) == 1
    assert torch.equal(embedding(torch.tensor([3])), expected)


class ReadsTheWeight(nn.Module):
    """Uses the weight of a linear layer without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 192)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.linear.weight.sum()


def test_model_that_reads_weights_itself_is_left_alone() -> None:
    module = ReadsTheWeight().requires_grad_(False)
    inputs = torch.ones(2, 128)
    expected = module(inputs)
    weight = module.linear.weight.data
    assert pack_linears(module, lambda: not module(inputs).isnan().any()) == 0
    assert module.linear.weight.data_ptr() == weight.data_ptr()
    assert torch.equal(module(inputs), expected)


class Doubled(nn.Linear):
    """A layer that only its own forward knows how to compute."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Doubled(128, 192), "a layer of another class"),
        (nn.Linear(16, 16), "too small"),
        (nn.Linear(128, 192, dtype=torch.float64), "a type that has no packed form"),
        (nn.Linear(128, 192, device="meta"), "not on the CPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layer_that_cannot_be_packed(layer: nn.Module, reason: str) -> None:
    assert not can_pack(layer), reason


def test_packing_that_computes_something_else_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "agrees_with", lambda *_: False)
    plain, kept = make_pair(torch.float32), make_pair(torch.float32)
    assert pack_linears(kept, lambda: True) == 0
    inputs = torch.ones(3, 128)
    assert torch.equal(kept(inputs), plain(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gpt_oss", "deepseek_v3", "phi3"])
def test_model_from_a_folder_is_packed_and_a_given_module_is_not(
    make_model: Any, tiny_tokenizer: Any, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    module = make_model(family, dtype, hidden_size=128, intermediate_size=256)
    module.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, device="cpu")
    assert any(is_packed(layer) for layer in loaded.module.modules())
    given, _ = load_model((module, tiny_tokenizer))
    assert not any(is_packed(layer) for layer in given.module.modules())
