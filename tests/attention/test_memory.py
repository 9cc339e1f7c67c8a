"""What is written has memory of its own: not an input's, not the other result's, no element twice."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import LayerCache, copy_blocks, paged_attention, transfer_blocks, write_kv
from pykv.attention.overlap import clash, repeats_itself


def arguments() -> dict[str, torch.Tensor]:
    """Arguments of `paged_attention` that fit: a sequence of 3 tokens in block 1."""
    return {
        "query": torch.randn(3, 4, 8),
        "key_cache": torch.randn(6, 2, 4, 8),
        "value_cache": torch.randn(6, 2, 4, 8),
        "block_tables": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([3], dtype=torch.int32),
        "query_starts": torch.tensor([0, 3], dtype=torch.int32),
    }


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache"])
def test_a_result_in_an_inputs_memory_is_refused(name: str) -> None:
    given = arguments()
    before = given[name].clone()
    out = given[name].view(-1)[: 3 * 4 * 8].view(3, 4, 8)
    with pytest.raises(ValueError, match=f"out shares memory with {name}; it must have memory of its own"):
        paged_attention(**given, out=out)
    with pytest.raises(ValueError, match=f"log_sum_exp shares memory with {name}"):
        paged_attention(**given, log_sum_exp=given[name].view(-1)[:12].view(3, 4))
    assert given[name].equal(before)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "query_starts"])
def test_a_result_in_the_memory_of_indices_is_refused(name: str) -> None:
    given = arguments()
    memory = torch.zeros(64)
    index = memory.view(torch.int32)[: given[name].numel()].view(given[name].shape)
    given[name] = index.copy_(given[name])
    with pytest.raises(ValueError, match=f"log_sum_exp shares memory with {name}"):
        paged_attention(**given, log_sum_exp=memory[:12].view(3, 4))


def test_results_that_share_memory_are_refused() -> None:
    given = arguments()
    with pytest.raises(ValueError, match=r"out has shape \(3, 4, 8\) and strides \(0, 0, 1\); it is written"):
        paged_attention(**given, out=torch.empty(1, 1, 8).expand(3, 4, 8))
    with pytest.raises(ValueError, match=r"log_sum_exp has shape \(3, 4\) and strides \(1, 0\)"):
        paged_attention(**given, log_sum_exp=torch.empty(3, 1).expand(3, 4))
    out = torch.empty(3, 4, 8)
    with pytest.raises(ValueError, match="out shares memory with log_sum_exp"):
        paged_attention(**given, out=out, log_sum_exp=out[:, :, 0])


def test_results_that_take_turns_in_one_buffer_are_filled() -> None:
    given = arguments()
    expected = paged_attention(**given)
    buffer = torch.empty(3, 12, 9)
    buffer[:, :4, :8] = given["query"]
    given["query"] = buffer[:, :4, :8]
    out, log_sum_exp = buffer[:, 4:8, :8], buffer[:, 8:, 8]
    assert paged_attention(**given, out=out, log_sum_exp=log_sum_exp).equal(expected)
    out, log_sum_exp = buffer[:, 4:8, :8], buffer[:, 4:8, 8]
    assert paged_attention(**given, out=out, log_sum_exp=log_sum_exp).equal(expected)


def rows_and_caches() -> dict[str, torch.Tensor]:
    return {
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 8),
        "key_cache": torch.zeros(6, 2, 4, 8),
        "value_cache": torch.zeros(6, 2, 4, 8),
        "slot_mapping": torch.tensor([1, 2]),
    }


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_an_expanded_cache_is_not_written(name: str) -> None:
    expanded = torch.zeros(1, 2, 4, 8).expand(6, 2, 4, 8)
    with pytest.raises(ValueError, match=rf"{name} has shape \(6, 2, 4, 8\) and strides \(0, 32, 8, 1\)"):
        write_kv(**rows_and_caches() | {name: expanded})
    caches = {"key_caches": [torch.zeros(6, 2, 4, 8)], "value_caches": [torch.zeros(6, 2, 4, 8)]}
    with pytest.raises(ValueError, match=rf"{name}s\[0\] has shape"):
        copy_blocks(**caches | {f"{name}s": [expanded]}, pairs=torch.tensor([[1, 2]]))
    assert not expanded.any()


def test_expanded_scales_are_not_written() -> None:
    scales = torch.zeros(6, 2, 2, 1).expand(6, 2, 2, 4)
    narrow = {name: torch.zeros(6, 2, 4, 8, dtype=torch.int8) for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="kv_scales has shape"):
        write_kv(**rows_and_caches() | narrow, kv_scales=scales)
    with pytest.raises(ValueError, match=r"kv_scales\[0\] has shape"):
        copy_blocks(*([cache] for cache in narrow.values()), torch.tensor([[1, 2]]), kv_scales=[scales])


def test_caches_that_share_memory_are_not_written() -> None:
    given = rows_and_caches()
    with pytest.raises(ValueError, match="key_cache shares memory with value_cache"):
        write_kv(**given | {"value_cache": given["key_cache"]})
    with pytest.raises(ValueError, match="value_cache shares memory with key; it must"):
        write_kv(**given | {"key": given["value_cache"][0].transpose(0, 1)[:2]})


def test_blocks_do_not_move_inside_one_pool() -> None:
    layer = LayerCache(torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8))
    other = LayerCache(layer.key, torch.zeros(6, 2, 4, 8))
    with pytest.raises(ValueError, match=r"targets\[0\]\.key shares memory with sources\[0\]"):
        transfer_blocks([layer], [other], torch.tensor([[1, 2]]))


LAYOUTS = {
    "one after the other": lambda: torch.zeros(2, 6, 2, 4, 8).unbind(0),
    "block by block": lambda: torch.zeros(6, 2, 2, 4, 8).unbind(1),
    "token by token": lambda: torch.zeros(6, 4, 2, 16).transpose(1, 2).split(8, dim=3),
    "values first": lambda: reversed(torch.zeros(6, 4, 2, 16).transpose(1, 2).split(8, dim=3)),
    "head by head": lambda: torch.zeros(6, 2, 2, 4, 8).unbind(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_may_take_turns_in_one_pool(layout: str) -> None:
    key_cache, value_cache = LAYOUTS[layout]()
    write_kv(**rows_and_caches() | {"key_cache": key_cache, "value_cache": value_cache})
    assert key_cache.sum() == value_cache.sum() == 2 * 2 * 8


def test_no_view_that_shares_an_element_is_missed() -> None:
    """All pairs of strided views of 24 bytes, against the addresses themselves."""
    memory = torch.zeros(24, dtype=torch.uint8)
    views = [
        memory.as_strided((size, other_size), (stride, other_stride), offset)
        for size in (1, 2, 3)
        for other_size in (0, 1, 2)
        for stride in (0, 1, 4, 6)
        for other_stride in (1, 2)
        for offset in (0, 2, 5)
    ]
    addresses = torch.arange(24)
    owned = [addresses.as_strided(view.shape, view.stride(), view.storage_offset()) for view in views]
    own_elements = [set(addresses.flatten().tolist()) for addresses in owned]
    for view, own in zip(views, own_elements, strict=True):
        assert repeats_itself(view) or len(own) == view.numel()
    nested = [place for place, view in enumerate(views) if not repeats_itself(view)]
    missed = [
        (views[one], views[other])
        for one in nested
        for other in nested
        if own_elements[one] & own_elements[other] and clash((views[one], views[other]), 1) is None
    ]
    assert missed == []
