"""Which layers share a block table, and what that holds of a long sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykv import Engine, EngineConfig, KvPool, SamplingParams
from pykv.layer_groups import LayerGroups
from pykv.layout import KvLayer, KvLayout


def layout(windows: list[int | None], **changes: Any) -> KvLayout:
    return KvLayout(tuple(KvLayer(2, 8, 8, window=window, **changes) for window in windows))


@pytest.mark.parametrize(
    ("windows", "groups", "num_storages"),
    [
        ([None] * 5, (None,), 5),
        ([6] * 4, (6,), 4),
        ([6, None] * 3, (6, None), 3),
        ([6, 6, 6, 6, 6, None] * 4 + [6, 6], (6,) * 11 + (None,) * 2, 2),
        ([6, 6, None], (6, None, 6), 1),
        ([6, 9, None, None], (6, 9, None, None), 1),
    ],
)
def test_groups_have_one_size_and_leave_little_empty(
    windows: list[int | None], groups: tuple[int | None, ...], num_storages: int
) -> None:
    found = LayerGroups.of(layout(windows))
    assert sorted(found.windows, key=str) == sorted(groups, key=str)
    assert found.num_storages == num_storages
    places = set(zip(found.group_of, found.storage_of, strict=True))
    assert len(places) == len(windows), "no two layers of a group share memory"
    for layer, window in enumerate(windows):
        assert found.windows[found.group_of[layer]] == window


def test_a_layer_that_reads_another_stands_where_that_one_does() -> None:
    layers = (KvLayer(2, 8, 8), KvLayer(2, 8, 8, 6), KvLayer(2, 8, 8, 6, reads_layer=1))
    found = LayerGroups.of(KvLayout(layers))
    assert found.group_of[2] == found.group_of[1]
    assert found.storage_of[2] == found.storage_of[1]
    assert found.num_storages == 1


def test_rows_of_different_sizes_stay_in_one_group() -> None:
    layers = (KvLayer(2, 8, 8), KvLayer(1, 16, 8, 6))
    found = LayerGroups.of(KvLayout(layers))
    assert (found.windows, found.num_storages) == ((None,), 2)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_pool_of_groups_has_memory_for_one_group_and_copies_it_once(name: str) -> None:
    mixed = layout([6, None] * 3)
    groups = LayerGroups.of(mixed)
    pool = KvPool(mixed, 5, 4, name, groups=groups)
    assert 2 * pool.nbytes == KvPool(mixed, 5, 4, name).nbytes
    for layer in range(6):
        pool.key_caches[layer].zero_()
    pool.key_caches[0][1] = 3  # layer 1 has the same memory
    assert (pool.key_caches[1][1] == 3).all()
    assert (pool.key_caches[2] == 0).all()
    pool.copy_blocks(torch.tensor([[1, 2]]))
    assert (pool.key_caches[0][2] == 3).all()
    assert (pool.key_caches[2][2] == 0).all()


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_long_sequence_holds_its_windows_and_no_more(make_model: Any, family: str) -> None:
    module = make_model(family)
    window, block_size, chunk = 6, 4, 8
    config = EngineConfig(block_size=block_size, num_blocks=200, max_chunk_tokens=chunk)
    engine = Engine(module, config=config)
    windows = LayerGroups.of(KvLayout.from_config(module.config)).windows
    prompt = [(7 * place) % 190 + 2 for place in range(90)]
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    full = -(-99 // block_size)
    most = -(-(window - 1 + chunk + block_size - 1) // block_size) + 1
    limit = sum(full if kept is None else most for kept in windows)
    assert engine.stats().peak_blocks_active <= limit
    assert engine.stats().peak_blocks_active < full * len(windows)
    engine.steps.check()


def test_foreign_numbers_where_a_window_has_passed_change_no_token(make_model: Any) -> None:
    """The null block stands for what left a window: whatever it holds is not read."""
    found = []
    for poison in (0.0, float("nan")):
        engine = Engine(make_model("gemma3_text"), config=EngineConfig(block_size=4, num_blocks=100))
        pool = engine.steps._runner.pool
        for cache in (*pool.key_caches, *pool.value_caches):
            cache[0] = poison
        prompt = [(11 * place) % 190 + 2 for place in range(40)]
        [output] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
