"""PyTorch's own attention on the same problems, with keys and values contiguous: no paging, the best case for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from paged_problem import PagedProblem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["flex", "sdpa"]


def batched(problem: PagedProblem) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value), each [num_rows, heads, tokens, head_dim] in bf16; rows must be alike."""
    num_rows = len(problem.shape.rows)
    rows = [problem.contiguous(row) for row in range(num_rows)]
    key, value = (
        torch.stack([row[kind].bfloat16() for row in rows]).transpose(1, 2).contiguous() for kind in (0, 1)
    )
    query = problem.query.unflatten(0, (num_rows, -1)).transpose(1, 2).contiguous()
    return query, key, value


def sdpa(problem: PagedProblem, backend: SDPBackend) -> Callable[[], Tensor]:
    """scaled_dot_product_attention, restricted to one backend; causal where there is more than one query."""
    query, key, value = batched(problem)
    causal = query.shape[2] > 1
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError("is_causal anchors at the first key: queries and keys must be as many")

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    return call


def flex(problem: PagedProblem) -> Callable[[], Tensor]:
    """flex_attention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = batched(problem)
    mask = None
    if query.shape[2] > 1:
        size = (query.shape[2], key.shape[2])
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, *size, device=str(query.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)
