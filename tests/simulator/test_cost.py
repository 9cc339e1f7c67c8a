"""Cost models by hand, by device and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pykv
from pykv.kv_format import kv_format_of
from pykv.planner.tables import gpu_names, gpu_table
from pykv.simulator.roofline import EFFICIENCY, HOST_BANDWIDTH, STEP_SECONDS
from pykv.simulator.served_model import served_model
from pykv.simulator.step_cost import read_cost


def test_a_model_that_was_saved_is_the_same_when_loaded(tmp_path: Path) -> None:
    model = pykv.CostModel(fixed=0.01, per_token=1e-5, overlaps=True)
    model.save(tmp_path / "model.json", error=0.1)
    assert json.loads((tmp_path / "model.json").read_text())["error"] == 0.1
    assert pykv.CostModel.load(tmp_path / "model.json") == model
    assert pykv.CostModel.parse(str(tmp_path / "model.json")) == model


def test_texts_name_models() -> None:
    assert pykv.CostModel.parse("constant:0.5") == pykv.CostModel(fixed=0.5)
    linear = pykv.CostModel.parse("linear:fixed=1e-2,per_context_token=2e-7")
    assert linear == pykv.CostModel(fixed=0.01, per_context_token=2e-7)


def test_a_roofline_is_the_data_sheet_over_the_efficiency() -> None:
    found = read_cost(
        "roofline:RTX-PRO-6000,flops=1e14,bandwidth=1e12,parameters=1e9,kv_bytes=1e5,efficiency=0.5"
    )
    model = found.model
    assert model.per_token == pytest.approx(2e9 / 50e12)
    assert model.weights == pytest.approx(2e9 / 0.5e12)
    assert model.per_context_token == pytest.approx(1e5 / 0.5e12)
    assert model.per_swapped_block == pytest.approx(16 * 1e5 / HOST_BANDWIDTH)
    assert (model.fixed, model.overlaps, found.served) == (STEP_SECONDS, True, None)
    assert any("attention computes nothing" in words for words in found.assumed)
    assert any("2 bytes a parameter" in words for words in found.assumed)


def test_a_dense_model_is_read_and_computed_whole() -> None:
    model = pykv.CostModel.parse("roofline:h100,model=llama-3.1-8b")
    flops, bandwidth = EFFICIENCY * 989e12, EFFICIENCY * 3.35e12
    # The input's embedding is not multiplied by anything, and of it only some rows are read.
    parameters = 8_030_261_248 - 128_256 * 4096
    assert model.per_token == pytest.approx(2 * parameters / flops)
    assert model.weights == pytest.approx(2 * parameters / bandwidth)
    assert model.per_context_token == pytest.approx(131_072 / bandwidth)
    # 32 layers of 32 query heads: two operations for each element of key and value.
    assert model.per_pair == pytest.approx(32 * 32 * 2 * (128 + 128) / flops)
    assert (model.experts, model.expert_share, model.window) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("name", "active", "total"),
    [
        ("mixtral-8x7b-v0.1", 12.9e9, 46.7e9),
        ("qwen3-30b-a3b", 3.3e9, 30.5e9),
        ("qwen3-235b-a22b", 22e9, 235e9),
        ("gpt-oss-120b", 5.1e9, 116.8e9),
        ("deepseek-v3", 37e9, 671e9),
        ("glm-4.5-air", 12e9, 107e9),
    ],
)
def test_a_token_passes_the_parameters_that_the_publishers_call_active(
    name: str, active: float, total: float
) -> None:
    served = served_model(name)
    assert served.token_flops / 2 == pytest.approx(active, rel=0.12)
    assert served.facts.num_parameters == pytest.approx(total, rel=0.01)


def test_a_batch_reads_the_experts_that_it_uses_in_the_dtype_that_they_have() -> None:
    mixtral = pykv.CostModel.parse("roofline:h100,model=mixtral-8x7b-v0.1")
    bandwidth = EFFICIENCY * 3.35e12
    experts = 32 * 8 * 3 * 4096 * 14_336
    assert mixtral.experts == pytest.approx(2 * experts / bandwidth)
    assert mixtral.expert_share == 2 / 8
    whole = (46_702_792_704 - 32_000 * 4096) * 2 / bandwidth
    assert mixtral.weights + mixtral.experts == pytest.approx(whole)
    fp8 = pykv.CostModel.parse("roofline:h100,model=mixtral-8x7b-v0.1,weights_dtype=fp8")
    assert fp8.experts == pytest.approx(mixtral.experts / 2)
    assert fp8.per_token == mixtral.per_token
    oss = served_model("gpt-oss-120b")
    assert oss.expert_bytes + oss.common_bytes < 65_248_815_744  # as published, in 4 bits
    assert oss.expert_bytes > 0.9 * oss.common_bytes
    published = served_model("deepseek-v3")
    assert published.weights_dtype == "fp8"
    assert published.expert_bytes + published.common_bytes < 1.02 * 671e9


def test_the_dtype_of_the_cache_changes_what_a_step_reads() -> None:
    text = "roofline:H100,model=llama-3.1-8b"
    sixteen, eight = (read_cost(text, kv_format=kv_format_of(name)).model for name in ("bf16", "fp8"))
    assert eight.per_context_token / sixteen.per_context_token == pytest.approx((128 + 4) / 256)
    assert eight.per_swapped_block / sixteen.per_swapped_block == pytest.approx((128 + 4) / 256)
    assert eight.weights == sixteen.weights
    by_hand = "roofline:H100,parameters=8e9,kv_bytes=131072"
    sixteen, eight = (read_cost(by_hand, kv_format=kv_format_of(name)).model for name in ("bf16", "int8"))
    assert eight.per_context_token / sixteen.per_context_token == pytest.approx((128 + 4) / 256)


def test_layers_with_a_window_read_and_attend_to_no_more_than_it() -> None:
    gemma = pykv.CostModel.parse("roofline:H100,model=gemma-3-27b-it")
    assert gemma.window == 1024
    served = served_model("gemma-3-27b-it")
    assert served.groups.windows.count(None) == 1
    full, windowed = (served.read_bytes(kv_format_of("bf16"), windowed=of) for of in (False, True))
    assert full + windowed == served.layout.bytes_per_token("bf16")
    assert gemma.per_window_token / gemma.per_context_token == windowed / full == pytest.approx(52 / 10)


def test_a_model_that_a_roofline_cannot_tell_is_refused() -> None:
    with pytest.raises(
        pykv.ConfigError, match=r"a replay cannot represent, as pykv does not serve it: .*state"
    ):
        read_cost("roofline:H100,model=ai21-jamba-mini-1.5")


def test_what_a_device_does_stands_in_one_table() -> None:
    known = [name for name in gpu_names() if gpu_table(name).flops_per_second]
    assert len(known) == 17
    for name in known:
        assert pykv.CostModel.parse(f"roofline:{name},model=llama-3.1-8b").per_token > 0
    own = pykv.CostModel.parse("roofline:RTX-PRO-6000,flops=4e14,parameters=3e10,kv_bytes=98304")
    assert own.per_token == pytest.approx(6e10 / (0.7 * 4e14))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "cost is 'nothing'"),
        ("constant:x", "constant is 'x'"),
        ("constant:-1", "fixed is -1.0: allowed is a number from 0 to 3600"),
        ("linear:speed=3", r"\['speed'\] is unknown: allowed are expert_share, experts, fixed"),
        ("roofline:abacus", "gpu is 'abacus', which is not known"),
        ("roofline:h100", "without parameters and kv_bytes: allowed is model=NAME, or both"),
        ("roofline:h100,parameters=8e9", "without kv_bytes: allowed is model=NAME"),
        ("roofline:h100,kv_bytes=1e5,parameters=8e9,weights_dtype=fp8", "weights_dtype without a model"),
        ("roofline:h100,model=llama-3.1-8b,kv_bytes=1e5", "cost gives kv_bytes beside the model"),
        ("roofline:h100,model=llama-3.1-8b,model=qwen3-8b", "cost gives model twice"),
        ("linear:fixed=1,window=1.5", "window is 1.5: allowed is an integer"),
        ("linear:fixed=1,expert_share=2", "expert_share is 2.0: allowed is a number from 0 to 1"),
        ("roofline:RTX-PRO-6000", "flops of RTX-PRO-6000-96GB are not known: give flops="),
        ("roofline:h100,model=unheard-of", "model is 'unheard-of'"),
        ("roofline:h100,colour=3", r"\['colour'\] is unknown"),
        ("roofline:h100,model=llama-3.1-8b,efficiency=2", "efficiency is 2"),
        ("roofline:h100,parameters=8e9,kv_bytes=nan", "kv_bytes is nan"),
        ("roofline:h100,model=llama-3.1-8b,fixed=x", "fixed is 'x'"),
    ],
)
def test_what_is_not_allowed_is_named(text: str, message: str) -> None:
    with pytest.raises(pykv.ConfigError, match=message):
        pykv.CostModel.parse(text)


@pytest.mark.parametrize("content", ["{", "[]", '{"cost_model": {"speed": 3}}', '{"cost_model": 5}'])
def test_a_file_that_is_no_model_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(pykv.ConfigError):
        pykv.CostModel.load(tmp_path / "model.json")


@pytest.mark.parametrize("value", [float("nan"), "1", True, None])
def test_a_part_that_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(pykv.ConfigError, match="fixed is"):
        pykv.CostModel(fixed=value)  # type: ignore[arg-type]
    with pytest.raises(pykv.ConfigError, match="overlaps is 1"):
        pykv.CostModel(overlaps=1)  # type: ignore[arg-type]
