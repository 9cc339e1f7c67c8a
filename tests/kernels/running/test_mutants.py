"""Each of these wrong kernels must be found out by a check that the right ones pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from address_space import lazy_zeros
from mutant_kernels import MutantKernels
from paged_cases import TOLERANCE, Case, PagedBatch, assert_near, build, empty_caches, quantize, share_keys

DECODES = Case(
    rows=((1, 37), (1, 64), (1, 0)),
    num_heads=4,
    head_dim_k=32,
    window=30,
    softcap=2.0,
    sinks=True,
    shuffle_rows=True,
)
PREFILLS = Case(rows=((9, 70), (1, 20), (20, 20)), num_heads=4, head_dim_k=32, spare_tokens=1)
SHARERS = Case(
    rows=((1, 90), (1, 70), (1, 75), (1, 40), (1, 90), (1, 37), (1, 60)),
    num_heads=8,
    num_kv_heads=1,
    head_dim_k=32,
    shuffle_rows=True,
)


def convert(kernels: Any, paged: PagedBatch) -> dict[str, Any]:
    """The same arguments in the types of the mutant's own modules."""
    types = kernels.arguments
    names = {"caches": types.Caches, "batch": types.Batch, "rule": types.Rule}
    return {
        name: kind(*(getattr(getattr(paged, name), part.name) for part in dataclasses.fields(kind)))
        for name, kind in names.items()
    }


def attended(
    kernels: Any, paged: PagedBatch, num_splits: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call with a given number of splits, a stale workspace and small tiles."""
    parts = convert(kernels, paged)
    result = kernels.arguments.Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
    sizes = (min(len(paged.query), paged.batch.num_rows), paged.query.shape[1], num_splits)
    stale = kernels.arguments.Workspace(
        torch.full((*sizes, paged.case.value_dim), math.nan), torch.zeros(sizes)
    )
    rows = paged.query.shape[1] // paged.caches.num_kv_heads * 8
    with pytest.MonkeyPatch.context() as patch:
        decode_config = kernels.tile_config.TileConfig(16, tile, 4, 2)
        prefill_config = kernels.tile_config.TileConfig(rows, tile, 4, 2)
        patch.setattr(kernels.attend, "_decode_config", lambda *_: decode_config)
        patch.setattr(kernels.attend, "_prefill_config", lambda *_: prefill_config)
        kernels.attend.attend(paged.query, *parts.values(), result, stale if num_splits > 1 else None)
    return result.out, result.lse


def check_attention(case: Case, num_splits: int, tile: int = 16) -> Callable[[Any], None]:
    def check(kernels: Any) -> None:
        paged = build(case)
        tables = paged.batch.block_tables
        tables[tables < 0] = 0  # a wrong kernel reads poison, not foreign memory
        out, lse = attended(kernels, paged, num_splits, tile)
        expected_out, expected_lse = paged.expected()
        assert_near(out, expected_out, TOLERANCE[case.dtype])
        seen = expected_lse > -math.inf
        assert_near(lse[seen], expected_lse[seen], TOLERANCE[case.dtype])
        assert (lse[~seen] == -math.inf).all()

    return check


def check_nan(kernels: Any) -> None:
    """A NaN among a sequence's own keys is seen, though three of its four splits are without."""
    paged = build(Case(rows=((1, 64),), num_heads=2, head_dim_k=32))
    paged.caches.key[int(paged.batch.block_tables[0, 1])] = math.nan
    out, lse = attended(kernels, paged, 4, 16)
    assert out.isnan().all()
    assert lse.isnan().all()


def check_sharing(case: Case, fewest: int = 16) -> Callable[[Any], None]:
    """A family of four, one of two, one row that begins alone; two members a program."""

    def check(kernels: Any) -> None:
        paged = build(case)
        for row, other, num_keys in ((0, 1, 64), (0, 2, 48), (0, 4, 80), (3, 5, 32)):
            share_keys(paged, row, other, num_keys)
        paged.batch.block_tables.clamp_(min=0)
        parts = convert(kernels, paged)
        sizes = (len(paged.query), paged.query.shape[1], 5)
        stale = torch.full((*sizes, paged.case.value_dim), math.nan), torch.zeros(sizes)
        workspace = kernels.arguments.Workspace(*stale, torch.zeros((3, 7), dtype=torch.int32), 3)
        result = kernels.arguments.Result(paged.empty_result(), torch.full(paged.query.shape[:2], math.nan))
        config = kernels.tile_config.TileConfig(16, 16, 4, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels.attend, "_decode_config", lambda *_: config)
            patch.setattr(kernels.attend, "_prefix_config", lambda *_: config)
            find = kernels.attend.find_prefixes
            patch.setattr(kernels.attend, "find_prefixes", lambda *arguments: find(*arguments, fewest))
            kernels.attend.attend(paged.query, *parts.values(), result, workspace)
        expected_out, expected_lse = paged.expected()
        assert_near(result.out, expected_out, TOLERANCE[case.dtype])
        assert_near(result.lse, expected_lse, TOLERANCE[case.dtype])

    return check


def check_write(kernels: Any) -> None:
    case = Case(cache="int8", head_dim_k=32, block_size=4)
    guarded = empty_caches(case, 6)
    guarded.key.fill_(7)
    guarded.value.fill_(7)
    scales = torch.full((6, 2, 2, 4), 7.0)
    caches = kernels.arguments.Caches(guarded.key[2:4], guarded.value[2:4], scales[2:4])
    key, value = torch.randn(3, 2, 32), torch.randn(3, 2, 32) * 9
    kernels.write_kv.launch_write_kv(key, value, caches, torch.tensor([5, -1, 3]))
    for kind, (tokens, cache) in enumerate(((key, guarded.key), (value, guarded.value))):
        codes, expected_scales = quantize(tokens, "int8")
        for token, (block, offset) in ((0, (3, 1)), (2, (2, 3))):
            assert torch.equal(cache[block, :, offset], codes[token])
            assert torch.equal(scales[block, kind, :, offset], expected_scales[token])
            cache[block, :, offset] = 7
        assert (cache == 7).all()


def check_write_nan(kernels: Any) -> None:
    caches = empty_caches(Case(cache="int8", head_dim_k=32, block_size=4), 1)
    key = torch.full((1, 2, 32), math.nan)
    parts = kernels.arguments.Caches(caches.key, caches.value, caches.scales)
    kernels.write_kv.launch_write_kv(key, key, parts, torch.tensor([1]))
    assert caches.scales is not None
    assert caches.scales[0, :, :, 1].isnan().all()


def check_copy(kernels: Any) -> None:
    caches = empty_caches(Case(head_dim_k=32, block_size=17), 4)
    caches.key.normal_()
    caches.value.normal_()
    keys, values = caches.key.clone(), caches.value.clone()
    keys[2], values[2] = keys[1], values[1]
    layer = kernels.arguments.Caches(caches.key, caches.value)
    kernels.copy_blocks.launch_copy_blocks(layer, layer, torch.tensor([[1, 2]]))
    assert torch.equal(caches.key, keys)
    assert torch.equal(caches.value, values)


def check_large(kernels: Any) -> None:
    """Room on both sides of the pool, so that a wrapped offset reads zeros."""
    pool = lazy_zeros(40, 1 << 27, dtype=torch.float16)[20:]
    assert 17 * pool.stride(0) > 1 << 31
    view = pool[:, : 2 * 32].view(20, 1, 2, 32)
    view[17] = torch.randn(1, 2, 32)
    caches = kernels.arguments.Caches(view, view)
    i32 = {"dtype": torch.int32}
    batch = kernels.arguments.Batch(
        torch.tensor([[17]], **i32), torch.tensor([2], **i32), torch.tensor([0, 1], **i32)
    )
    query, out = torch.zeros(1, 1, 32).half(), torch.full((1, 1, 32), math.nan).half()
    kernels.attend.attend(
        query, caches, batch, kernels.arguments.Rule(1.0), kernels.arguments.Result(out), None
    )
    assert_near(out[0, 0], view[17, 0].double().mean(0), 2e-3)


CHECKS: dict[str, Callable[[Any], None]] = {
    "decode": check_attention(DECODES, 3),
    "decode, one split": check_attention(dataclasses.replace(DECODES, block_size=64), 1),
    "decode, int8": check_attention(dataclasses.replace(DECODES, cache="int8", dtype=torch.float16), 2),
    "decode, fp8": check_attention(dataclasses.replace(DECODES, cache="e4m3", dtype=torch.float16), 2),
    "prefill": check_attention(PREFILLS, 2),
    "prefill, window": check_attention(dataclasses.replace(PREFILLS, window=11, sinks=True), 2),
    "sharing": check_sharing(SHARERS),
    "sharing, window": check_sharing(dataclasses.replace(SHARERS, window=72)),
    "decode, NaN": check_nan,
    "write": check_write,
    "write, NaN": check_write_nan,
    "copy": check_copy,
    "large": check_large,
}

# name: (file, what stands there, what the mutant has instead, the check that must fail)
MUTANTS = {
    "decode sees one key too many": ("tile_loop.py", "else position < end", "else position <= end", "decode"),
    "decode misses the tail": (
        "decode.py", "tl.cdiv(length, TILE) - first_tile", "length // TILE - first_tile", "decode",
    ),
    "decode's window is one too short": (
        "decode.py", "tl.maximum(length - window, 0)", "tl.maximum(length - window + 1, 0)", "decode",
    ),
    "decode ignores the window's edge": (
        "tile_loop.py", "live = live & (position >= begin)", "live = live & (position >= 0)", "decode",
    ),
    "decode interleaves the heads": (
        "decode.py", "query_head = head * GROUP + member", "query_head = head + member * tl.num_programs(1)", "decode",
    ),
    "decode skips a split's last tile": (
        "decode.py", "tl.minimum((split + 1) * share, num_tiles)", "tl.minimum((split + 1) * share - 1, num_tiles)",
        "decode",
    ),
    "an empty split leaves what was there": (
        "decode.py", "log_sum_exp(maximum, denominator), mask=is_head)",
        "log_sum_exp(maximum, denominator), mask=is_head & (denominator > 0))", "decode",
    ),
    "offsets have 32 bits": ("tile_loop.py", "block = blocks.to(tl.int64)", "block = blocks", "large"),
    "decode takes the batch row for the table row": (
        "addressing.py", "table_row = tl.load(table_rows_ptr + row, mask=exists, other=0)", "table_row = row + 3",
        "decode",
    ),
    "a token sees its row's later tokens": (
        "addressing.py", "seq_len - (end - 1 - token)", "seq_len", "decode, tokens of longer rows",
    ),
    "a split with a NaN passes for an empty one": (
        "softmax.py", "seen = denominator != 0", "seen = denominator > 0", "decode, NaN",
    ),
    "the reduction weighs by the splits' number": (
        "decode_reduce.py", "weights = tl.math.exp2(lse - shift)", "weights = tl.where(filled, 1.0, 0.0)", "decode",
    ),
    "the reduction reads unwritten parts": (
        "decode_reduce.py", "mask = filled[:, None] &", "mask = (place < num_parts)[:, None] &", "decode",
    ),
    "the reduction forgets the sink": (
        "decode_reduce.py", "total += tl.math.exp2(sink - shift)", "total += 0.0 * sink", "decode",
    ),
    "a row without keys weighs the sink": (
        "decode_reduce.py", "tl.where(maximum > float(\"-inf\"), tl.load(sinks_ptr + head) * LOG2E, float(\"-inf\"))",
        "tl.load(sinks_ptr + head) * LOG2E", "decode",
    ),
    "the sink is in the wrong base": ("decode.py", "other=0.0) * LOG2E", "other=0.0)", "decode, one split"),
    "the log-sum-exp is in the wrong base": (
        "decode.py", "log_sum_exp(maximum, denominator) * LN2", "log_sum_exp(maximum, denominator)",
        "decode, one split",
    ),
    "the scale is in the wrong base": ("scores.py", "scale if HAS_CAP else scale * LOG2E", "scale", "prefill"),
    "the cap is in the wrong base": ("softmax.py", "(softcap * LOG2E)", "(softcap * 1.0)", "decode"),
    "sums are not rescaled": (
        "softmax.py", "first = first * rescale[:, None]", "first = first * 1.0", "decode, one split",
    ),
    "the odd sums are not rescaled": (
        "softmax.py", "acc=second * rescale[:, None]", "acc=second", "decode, int8",
    ),
    "values are scaled like keys": (
        "scores.py", "scales_ptr + kind_stride + slots", "scales_ptr + slots", "decode, int8",
    ),
    "int8 is off by one": (
        "eight_bit.py", "even = _pairs_to_float16(even_bits, ROWS, PADDED // 4) - 1152.0",
        "even = _pairs_to_float16(even_bits, ROWS, PADDED // 4) - 1151.0", "decode, int8",
    ),
    "fp8 loses its sign": (
        "eight_bit.py", "odd = (words & 0x80008000)", "odd = (words & 0x00008000)", "decode, fp8",
    ),
    "prefill hides the diagonal": (
        "prefill.py", "seen_end = tl.minimum(query_position + 1, end)", "seen_end = tl.minimum(query_position, end)",
        "prefill",
    ),
    "prefill anchors the mask at the row's begin": (
        "prefill.py", "query_position = seq_len - count + query_index", "query_position = query_index", "prefill",
    ),
    "prefill leaves a tile unmasked": (
        "prefill.py", "tl.maximum(tl.minimum(origin + 1, end), 0) // TILE",
        "tl.maximum(tl.minimum(origin + 1 + TILE, end), 0) // TILE", "prefill",
    ),
    "prefill's window is one too long": (
        "prefill.py", "seen_begin = query_position - window + 1", "seen_begin = query_position - window",
        "prefill, window",
    ),
    "prefill loses the last block": (
        "prefill.py", "num_tokens // tokens + batch.num_rows + 1", "num_tokens // tokens + batch.num_rows", "prefill",
    ),
    "rows that share read the prefix themselves too": (
        "decode.py", "begin = tl.maximum(begin, shared)", "begin = begin + 0 * shared", "sharing",
    ),
    "a row that shares nothing keeps another's parts": (
        "decode.py", "if (shared == 0) & (split == 0):", "if (shared != 0) & (split == 0):", "sharing",
    ),
    "members see as much as the longest of them": (
        "shared_prefix.py", "split_begin, split_end, 0, end, None, shared,",
        "split_begin, split_end, 0, end, None, None,", "sharing",
    ),
    "a program leaves out all members but its first": (
        "shared_prefix.py", "is_member & (member_rank == rank + member)", "is_member & (member_rank == rank)",
        "sharing",
    ),
    "a later program walks the wrong table": (
        "shared_prefix.py", "prefixes_ptr + place - rank)", "prefixes_ptr + (place - rank) * 0)", "sharing",
    ),
    "the prefix's parts take the place of the row's own": (
        "shared_prefix.py", "(num_parts - num_splits) + split", "split", "sharing",
    ),
    "a prefix goes one tile too far": (
        "find_prefixes.py", "same * BLOCK_SIZE // UNIT * UNIT", "(same * BLOCK_SIZE // UNIT + 1) * UNIT", "sharing",
    ),
    "a first block is enough to share all": (
        "find_prefixes.py", "tl.where(blocks != partner_blocks, column, limit)",
        "tl.where(column < 0, column, limit)", "sharing",
    ),
    "a window does not end the sharing": (
        "find_prefixes.py", "may_share = may_share & (length <= window)", "may_share = may_share & (length > 0)",
        "sharing, window",
    ),
    "the write takes -1 for a slot": (
        "write_kv.py", "live = (slot >= 0) & (slot < num_slots)", "live = (slot >= -1) & (slot < num_slots)", "write",
    ),
    "the write scales keys by the values' place": (
        "write_kv.py", "scale_slots + scales_stride_kind", "scale_slots", "write",
    ),
    "a NaN is written as a number": (
        "eight_bit.py", "tl.where(num_nans > 0, float(\"nan\"), scales)", "tl.where(num_nans > 0, 1.0, scales)",
        "write, NaN",
    ),
    "the copy misses a block's tail": (
        "copy_blocks.py", "live = slot < BLOCK_SIZE", "live = slot < BLOCK_SIZE - 1", "copy",
    ),
}  # fmt: skip

CHECKS["decode, tokens of longer rows"] = check_attention(
    Case(rows=((3, 20), (0, 0), (0, 5)), num_heads=2, head_dim_k=32), 2
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_kernels_pass(check: str, tmp_path: Path) -> None:
    kernels = MutantKernels(tmp_path, f"unchanged_{list(CHECKS).index(check)}", "", "", "")
    CHECKS[check](kernels)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str, tmp_path: Path) -> None:
    file, original, changed, check = MUTANTS[name]
    kernels = MutantKernels(tmp_path, f"mutant_{list(MUTANTS).index(name)}", file, original, changed)
    with pytest.raises(AssertionError):
        CHECKS[check](kernels)
