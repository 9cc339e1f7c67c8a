"""Which models pass the gate, which are refused, and by which check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pykv import ConfigError, UnsupportedModelError
from pykv.attention import cpu_backend, torch_backend
from pykv.kv_format import kv_format_of
from pykv.models import load_model
from pykv.models.gate import admit, check_format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_that_is_exact_is_admitted(make_model: Any, admitted_family: str, dtype: torch.dtype) -> None:
    module = make_model(admitted_family, dtype)
    model = admit(module, name=admitted_family)
    assert model.module is module
    assert model.dtype == dtype
    assert model.vocab_size == 199
    assert model.max_model_len >= 512
    assert model.layout.num_layers == 4
    assert module.config._attn_implementation == "pykv"


def test_float16_is_admitted(make_model: Any) -> None:
    assert admit(make_model("llama", torch.float16), name="llama").dtype == torch.float16


@pytest.mark.parametrize(
    ("family", "check"),
    [
        ("falcon", "attention backend"),
        ("bloom", "attention backend"),
        ("llama4_text", "layer types"),
        ("qwen3_next", "attention backend"),
    ],
)
def test_model_that_would_be_silently_wrong_is_refused(make_model: Any, family: str, check: str) -> None:
    module = make_model(family)
    before = module.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=f"check '{check}'"):
        admit(module, name=family)
    assert module.config._attn_implementation == before


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_probe_refuses_what_only_claims_to_fit(
    make_model: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_model(family)
    monkeypatch.setattr(type(module), "_supports_attention_backend", True)
    with pytest.raises(UnsupportedModelError, match=r"check '(probe|probe logits|attention .*|layout)'"):
        admit(module, name=family, max_model_len=64)


def test_linear_attention_layers_are_refused_by_name(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_model("qwen3_next")
    monkeypatch.setattr(type(module), "_supports_attention_backend", True)
    with pytest.raises(UnsupportedModelError, match="check 'layer types': layer 0 is 'linear_attention'"):
        admit(module, name="qwen3_next")


def test_layer_that_looks_at_its_neighbour_in_the_batch_is_refused(make_model: Any) -> None:
    module = make_model("llama")

    def shift_tokens(layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * output.roll(1, dims=1)

    module.model.layers[1].mlp.register_forward_hook(shift_tokens)
    with pytest.raises(UnsupportedModelError, match="check 'probe logits'"):
        admit(module, name="llama")


def test_layer_that_does_not_attend_through_the_interface_is_refused(make_model: Any) -> None:
    module = make_model("llama")
    module.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match=r"check 'attention calls': 3 calls .* 4 layers"):
        admit(module, name="llama")


def test_layer_with_another_window_than_its_config_says_is_refused(make_model: Any) -> None:
    module = make_model("gemma3_text")
    module.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="check 'layout': layer 0"):
        admit(module, name="gemma3_text")


def test_attention_with_another_scale_than_the_eager_one_is_refused(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def cooler(*args: Any, scaling: float, **others: Any) -> Any:
        return own(*args, scaling=scaling * 0.99, **others)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", cooler)
    with pytest.raises(UnsupportedModelError, match=r"check 'probe logits'.*a row in float32"):
        admit(make_model("llama", torch.bfloat16), name="llama")


def without_window(*args: Any, window: int | None, **others: Any) -> torch.Tensor:
    """Kernels that forget the window."""
    return torch_backend.paged_attention(
        *args, window=None, **{name: value for name, value in others.items() if name != "share_prefixes"}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_that_compute_something_else_are_not_let_serve(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(cpu_backend, "paged_attention", without_window)
    for backend in ("auto", "cpu"):
        with pytest.raises(UnsupportedModelError, match="check 'probe logits'"):
            admit(make_model("gemma3_text", dtype), name="gemma3", attention_backend=backend)
    assert admit(make_model("gemma3_text", dtype), name="gemma3", attention_backend="torch").dtype is dtype


@pytest.mark.parametrize("name", ["int8", "fp8", "f16"])
def test_kernels_are_tried_over_the_format_of_the_cache(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = admit(make_model("gemma3_text"), name="gemma3")
    formats = [kv_format_of(name)]
    formats += [kv_format_of(name).with_tensor_scales(0.02, 0.01)] if name != "f16" else []
    told: list[str] = []
    for form in formats:
        check_format(model, form, "auto", told.append)
    assert [line.split()[:5] for line in told[1::2]] == [["checking", "a", "cache", "of", name]] * len(
        formats
    )
    monkeypatch.setattr(cpu_backend, "paged_attention", without_window)
    for form in formats:
        check_format(model, form, "torch", lambda _: None)
        with pytest.raises(UnsupportedModelError, match="check 'probe logits'"):
            check_format(model, form, "auto", lambda _: None)


def test_a_backend_that_the_machine_cannot_run_is_refused_before_anything_is_read(make_model: Any) -> None:
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter serves the CPU")
    module = make_model("llama")
    before = module.config._attn_implementation
    message = r"attention_backend is 'triton', but the Triton kernels .*: allowed for 'cpu' is 'torch', 'cpu'"
    with pytest.raises(ConfigError, match=message):
        admit(module, name="llama", attention_backend="triton")
    assert module.config._attn_implementation == before
    with pytest.raises(ConfigError, match=message):
        load_model("no such model", device="cpu", attention_backend="triton")
    with pytest.raises(ConfigError, match="attention_backend is 'magic': allowed are 'auto', "):
        load_model("no such model", device="cpu", attention_backend="magic")


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="check 'architecture': Linear"):
        admit(nn.Linear(2, 2), name="linear")


def test_model_without_logits_is_refused(make_model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="check 'architecture': LlamaModel gives no logits"):
        admit(make_model("llama").model, name="llama")


def test_weights_of_another_type_are_refused(make_model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"check 'dtype': the weights are torch\.float64"):
        admit(make_model("llama").double(), name="llama")


def test_probe_leaves_windows_and_weights_as_they_were(make_model: Any) -> None:
    module = make_model("gemma3_text", torch.bfloat16)
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    admit(module, name="gemma3_text")
    assert module.config.sliding_window == 6
    assert [layer.self_attn.sliding_window for layer in module.model.layers] == [6, None, 6, None]
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_context_is_the_smaller_of_the_models_and_the_asked_one(make_model: Any) -> None:
    assert admit(make_model("llama"), name="llama", max_model_len=100).max_model_len == 100
    assert admit(make_model("llama"), name="llama", max_model_len=1000).max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len is 0"):
        admit(make_model("llama"), name="llama", max_model_len=0)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "rope", "limit"),
    [("phi3", LONGROPE, 64), ("llama", DYNAMIC, 512)],
    ids=["longrope", "dynamic"],
)
def test_rotary_that_depends_on_the_batch_is_pinned_or_refused(
    make_model: Any, family: str, rope: dict[str, Any], limit: int
) -> None:
    sizes = {"rope_parameters": rope, "original_max_position_embeddings": 64} if family == "phi3" else {}
    module = make_model(family, **({"rope_parameters": rope} | sizes))
    assert admit(module, name=family).max_model_len == limit
    assert admit(module, name=family, max_model_len=limit).max_model_len == limit
    with pytest.raises(UnsupportedModelError, match=f"check 'rotary': beyond {limit} tokens"):
        admit(module, name=family, max_model_len=limit + 1)
