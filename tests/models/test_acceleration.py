"""Packed linear layers: the same results, no second copy of the weights, and nothing where it would be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pykv.models import load_model
from pykv.models.acceleration import pack_linears
from pykv.models.packed_linear import PackedLinear, can_pack
from pykv.models.siblings import Siblings

DTYPES = [torch.float32, torch.bfloat16]


def siblings_of(layer: nn.Module) -> Siblings | None:
    """The product that the layer shares with others."""
    owner = getattr(getattr(layer.forward, "func", None), "__self__", None)
    return owner if isinstance(owner, Siblings) else None


def is_packed(layer: nn.Module) -> bool:
    shared = siblings_of(layer)
    compute = layer.forward if shared is None else shared._compute
    return isinstance(getattr(compute, "__self__", None), PackedLinear)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(576, 1536), (576, 576), (300, 1023)], ids=str)
def test_a_rows_result_does_not_depend_on_how_many_there_are(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = PackedLinear.of(torch.randn(*sizes, generator=generator).to(dtype), None)
    inputs = torch.randn(40, sizes[1], generator=generator).to(dtype)
    expected = packed.compute(inputs)
    if packed.least_rows is None and not torch.equal(packed.compute(inputs[:20]), expected[:20]):
        pytest.skip("the library sums many rows in several orders here")
    for first in range(40):
        for count in (1, 2, 3, 7):
            assert torch.equal(packed.compute(inputs[first : first + count]), expected[first : first + count])


def test_few_rows_are_computed_as_if_there_were_more() -> None:
    packed = PackedLinear.of(torch.ones(192, 128), torch.ones(192))
    for shape in ((128,), (1, 128), (1, 3, 128), (2, 4, 128)):
        result = replace(packed, least_rows=4).compute(torch.ones(shape))
        assert torch.equal(result, torch.full((*shape[:-1], 192), 129.0))


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


class Branches(nn.Module):
    """Two layers of one input, and a third of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(128, 192), nn.Linear(128, 128), nn.Linear(192, 128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        left, right = self.left(inputs), self.right(inputs)
        return self.join(left, right)

    def join(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.last(left) * right


class ContiguousBranches(Branches):
    """As its base, but it takes the shape of a result for that of its memory."""

    def join(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.last(left) * right.view(-1).view(right.shape)


@pytest.mark.parametrize(("kind", "num_siblings"), [(Branches, 2), (ContiguousBranches, 0)])
def test_layers_with_one_input_become_one_product(kind: type[Branches], num_siblings: int) -> None:
    torch.manual_seed(0)
    module = kind().requires_grad_(False)
    inputs = torch.randn(5, 128)
    expected = module(inputs)
    assert pack_linears(module, lambda: not module(inputs).isnan().any()) == 3
    assert sum(siblings_of(layer) is not None for layer in module.children()) == num_siblings
    assert all(is_packed(layer) for layer in module.children())
    for _ in range(2):
        torch.testing.assert_close(module(inputs), expected, atol=1e-5, rtol=1e-5)


def test_siblings_compute_once_for_an_input_and_again_for_another() -> None:
    calls: list[torch.Tensor] = []

    def double(input: torch.Tensor) -> torch.Tensor:
        calls.append(input)
        return 2 * input

    siblings = Siblings(double, [1, 2])
    first, second = torch.arange(3.0), torch.arange(3.0, 6.0)
    assert siblings.part(0, first).tolist() == [0]
    assert siblings.part(1, first).tolist() == [2, 4]
    assert len(calls) == 1
    assert siblings.part(1, first).tolist() == [2, 4]  # all parts were given out: computed anew
    assert siblings.part(1, first).tolist() == [2, 4]  # this part was given out
    assert siblings.part(0, second).tolist() == [6]  # another input
    assert len(calls) == 4
    assert calls[-1] is second


def test_attention_and_feed_forward_of_a_model_are_joined(
    make_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    make_model("llama", hidden_size=256, intermediate_size=256).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, device="cpu")
    for layer in model.module.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        joined = siblings_of(attention.q_proj)
        assert joined is not None
        assert siblings_of(attention.k_proj) is joined
        assert siblings_of(attention.v_proj) is joined
        assert siblings_of(feed_forward.gate_proj) is siblings_of(feed_forward.up_proj)
        assert siblings_of(attention.o_proj) is None


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
