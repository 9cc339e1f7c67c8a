"""Cost models by hand, by device and by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pykv
from pykv.planner.tables import gpu_names
from pykv.simulator.cost import FLOPS


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
    model = pykv.CostModel.roofline(
        flops=100e12, bytes_per_second=1e12, num_parameters=1e9, kv_bytes_per_token=1e5, efficiency=0.5
    )
    assert model.per_token == pytest.approx(2e9 / 50e12)
    assert model.weights == pytest.approx(2e9 / 0.5e12)
    assert model.per_context_token == pytest.approx(1e5 / 0.5e12)
    assert model.overlaps


def test_a_roofline_is_named_by_the_planners_names() -> None:
    by_name = pykv.CostModel.parse("roofline:h100,model=llama-3.1-8b")
    by_hand = pykv.CostModel.roofline(
        flops=989e12, bytes_per_second=3.35e12, num_parameters=8_030_261_248, kv_bytes_per_token=131_072
    )
    assert by_name == by_hand
    assert set(FLOPS) < set(gpu_names())
    own = pykv.CostModel.parse("roofline:RTX-PRO-6000,flops=4e14,parameters=3e10,kv_bytes=98304")
    assert own.per_token == pytest.approx(6e10 / (0.7 * 4e14))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "cost is 'nothing'"),
        ("constant:x", "constant is 'x'"),
        ("constant:-1", "fixed is -1.0: allowed are seconds from 0"),
        ("linear:speed=3", r"\['speed'\] is unknown; known are fixed"),
        ("roofline:abacus", "gpu is 'abacus', which is not known"),
        ("roofline:RTX-PRO-6000", "flops of RTX-PRO-6000-96GB are not known: give flops="),
        ("roofline:h100,model=unheard-of", "model is 'unheard-of'"),
        ("roofline:h100,colour=3", r"\['colour'\] is unknown"),
        ("roofline:h100,efficiency=2", "efficiency is 2"),
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
