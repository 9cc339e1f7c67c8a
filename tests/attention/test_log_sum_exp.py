"""The log-sum-exps, and what they are for: merging results over parts of the keys."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import paged_attention

BACKENDS = ["torch", "cpu"]


def attend(batch, backend, **options):
    """Returns the output and the log-sum-exps."""
    log_sum_exp = torch.full(batch.query.shape[:2], 7.0)
    output = paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        **batch.step(),
        **options,
        log_sum_exp=log_sum_exp,
        backend=backend,
    )
    return output, log_sum_exp


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "softcap": 2.0, "sinks": torch.tensor([0.5, 1, -2, 3])}]
)
def test_they_are_those_of_the_scores(paging, backend, dtype, options):
    batch = paging.build(paging.shape(rows=((1, 700), (3, 5), (1, 0)), dtype=dtype))
    _, log_sum_exp = attend(batch, backend, **options)
    exact = paging.build(paging.shape(rows=((1, 700), (3, 5), (1, 0)), dtype=dtype))
    exact.query, exact.key_cache, exact.value_cache = (
        tensor.double() for tensor in (exact.query, exact.key_cache, exact.value_cache)
    )
    _, expected = attend(exact, "torch", **options)
    torch.testing.assert_close(
        log_sum_exp, expected, rtol=1e-5, atol=4e-3 if dtype is torch.bfloat16 else 1e-5
    )
    assert log_sum_exp[-1].eq(-torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_merge_to_the_whole(paging, backend):
    whole = paging.build(paging.shape(rows=((1, 90),), block_size=4))
    expected, _ = attend(whole, backend)
    outputs, weights = [], []
    for first, end in ((0, 40), (40, 90)):
        part = paging.build(paging.shape(rows=((1, 90),), block_size=4))
        part.block_tables = part.block_tables[:, first // 4 :].contiguous()
        part.seq_lens[0] = end - first
        output, log_sum_exp = attend(part, backend)
        outputs.append(output)
        weights.append(log_sum_exp)
    shares = torch.softmax(torch.stack(weights), dim=0)[..., None]
    torch.testing.assert_close((torch.stack(outputs) * shares).sum(0), expected, rtol=1e-5, atol=1e-6)
