"""Merges the parts of a decode: a grid of (token, query head)."""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.arguments import Batch, Result, Rule, Workspace, padded
from pykv.kernels.softmax import LN2, LOG2E

__all__ = ["reduce_every_token", "reduce_single_rows"]


def reduce_every_token(workspace: Workspace, batch: Batch, rule: Rule, result: Result) -> None:
    """Fills the result from what `decode_every_token` left in the workspace."""
    _launch(workspace, batch, rule, result, by_row=False)


def reduce_single_rows(workspace: Workspace, batch: Batch, rule: Rule, result: Result) -> None:
    """Fills the results of the rows with one token from what `decode_single_rows` left in the workspace."""
    _launch(workspace, batch, rule, result, by_row=True)


def _launch(workspace: Workspace, batch: Batch, rule: Rule, result: Result, *, by_row: bool) -> None:
    num_items, num_heads, num_parts, head_dim_v = workspace.out.shape
    padded_parts = triton.next_power_of_2(num_parts)
    decode_reduce_kernel[num_items, num_heads](
        result.out,
        result.lse,
        workspace.out,
        workspace.lse,
        batch.query_starts,
        rule.sinks,
        num_parts,
        *result.out.stride()[:2],
        BY_ROW=by_row,
        HEAD_DIM_V=head_dim_v,
        PADDED_V=padded(head_dim_v),
        PADDED_PARTS=padded_parts,
        enable_fp_fusion=True,
        num_warps=max(1, min(8, padded_parts * padded(head_dim_v) // 2048)),
    )


@triton.jit(do_not_specialize=["num_parts"])
def decode_reduce_kernel(
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, query_starts_ptr, sinks_ptr,
    num_parts, out_stride_token, out_stride_head,
    BY_ROW: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_V: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = item
    if BY_ROW:
        token = tl.load(query_starts_ptr + item)
        if tl.load(query_starts_ptr + item + 1) - token != 1:
            return
    place = tl.arange(0, PADDED_PARTS)
    column = tl.arange(0, PADDED_V)
    part = (item.to(tl.int64) * num_heads + head) * num_parts + place
    lse = tl.load(partial_lse_ptr + part, mask=place < num_parts, other=float("-inf"))
    filled = lse > float("-inf")
    maximum = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.where(maximum > float("-inf"), tl.load(sinks_ptr + head) * LOG2E, float("-inf"))
        maximum = tl.maximum(maximum, sink)
    shift = tl.where(maximum > float("-inf"), maximum, 0.0)
    weights = tl.math.exp2(lse - shift)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.math.exp2(sink - shift)
    divisor = tl.where(total != 0, total, 1.0)
    mask = filled[:, None] & (column < HEAD_DIM_V)[None, :]
    parts = tl.load(partial_out_ptr + part[:, None] * HEAD_DIM_V + column[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / divisor
    out_row = token.to(tl.int64) * out_stride_token + head * out_stride_head
    tl.store(out_ptr + out_row + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM_V)
    if lse_ptr is not None:
        log = tl.where(total != 0, (shift + tl.math.log2(divisor)) * LN2, float("-inf"))
        tl.store(lse_ptr + token.to(tl.int64) * num_heads + head, log)
