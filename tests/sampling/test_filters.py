"""The lowest logit that stays, against the logits processors of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pykv.sampling.filters import lowest_kept


def logits_of(scale, rows=4, vocab_size=2000):
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(rows, vocab_size, generator=generator) * scale
    return logits - logits.amax(-1, keepdim=True)


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    rows = len(logits)
    floors = lowest_kept(
        logits, np.full(rows, top_k), np.full(rows, top_p, np.float32), np.full(rows, min_p, np.float32)
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
    min_ps = np.array([0.0, 0.0, 0.5], np.float32)
    floors = lowest_kept(logits, np.array([0, 1, 2]), np.ones(3, np.float32), min_ps)
    assert (logits >= floors).sum(-1).tolist() == [3, 1, 1]


def test_equal_tokens_stay_together():
    logits = torch.zeros(1, 10)
    assert kept(logits, top_k=3).all()
    assert kept(logits, top_p=0.3).all()


class NoReads(TorchDispatchMode):
    """Refuses the operators by which the host reads a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(read in name for read in ("_local_scalar_dense", "nonzero", "is_nonzero")), name
        return func(*args, **(kwargs or {}))


def test_top_k_and_min_p_wait_for_no_device():
    logits = logits_of(1.0)
    with NoReads():
        kept(logits, top_k=40, min_p=0.1)
    with NoReads(), pytest.raises(AssertionError, match="nonzero"):
        kept(logits, top_p=0.5)
