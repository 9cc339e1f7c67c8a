"""The lowest logit that stays, against the logits processors of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pykv.sampling.filters import lowest_kept


def logits_of(scale, rows=4, vocab_size=2000):
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(rows, vocab_size, generator=generator) * scale
    return logits - logits.amax(-1, keepdim=True)


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    rows = len(logits)
    floors = lowest_kept(
        logits, torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)
    )
    return logits >= floors


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_nucleus(scale, top_p):
    logits = logits_of(scale)
    expected = TopPLogitsWarper(top_p)(None, logits) > -torch.inf
    differing = (kept(logits, top_p=top_p) != expected).sum(-1)
    assert bool((differing <= 1).all())  # the last token may sit on the border of float32


@pytest.mark.parametrize("top_k", [1, 2, 50, 1999, 2000, 5000])
def test_top_k_keeps_the_k_likeliest(top_k):
    logits = logits_of(1.0)
    expected = TopKLogitsWarper(top_k)(None, logits) > -torch.inf
    assert torch.equal(kept(logits, top_k=top_k), expected)


@pytest.mark.parametrize("min_p", [0.01, 0.5, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p):
    logits = logits_of(1.0)
    expected = MinPLogitsWarper(min_p)(None, logits) > -torch.inf
    assert torch.equal(kept(logits, min_p=min_p), expected)


def test_top_p_looks_at_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    logits -= logits.max()
    assert kept(logits, top_k=2, top_p=0.5).tolist() == [[True, False, False, False]]
    assert kept(logits, top_p=0.5).tolist() == [[True, True, False, False]]


def test_rows_do_not_share_their_limits():
    logits = torch.tensor([[0.0, -1.0, -2.0]] * 3)
    floors = lowest_kept(logits, torch.tensor([0, 1, 2]), torch.ones(3), torch.tensor([0.0, 0.0, 0.5]))
    assert (logits >= floors).sum(-1).tolist() == [3, 1, 1]


def test_equal_tokens_stay_together():
    logits = torch.zeros(1, 10)
    assert kept(logits, top_k=3).all()
    assert kept(logits, top_p=0.3).all()
