"""Drawing inverts the running sum, and never draws what has no weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykv.sampling.draw import draw


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_draw_follows_the_running_sum(vocab_size):
    weights = torch.rand(64, vocab_size, generator=torch.Generator().manual_seed(2))
    numbers = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sums = weights.double().cumsum(-1)
    expected = (sums <= numbers[:, None] * sums[:, -1:]).sum(-1)
    assert torch.equal(draw(weights, numbers), expected)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_without_weight_is_never_drawn(number):
    weights = torch.zeros(3, 600)
    weights[0, 300], weights[1, 0], weights[2, 599] = 1e-30, 1.0, 3.0
    assert draw(weights, torch.full((3,), number, dtype=torch.float64)).tolist() == [300, 0, 599]


def test_tokens_come_as_often_as_they_weigh():
    weights = torch.tensor([[1.0, 0.0, 2.0, 5.0]]).expand(16_000, 4).contiguous()
    numbers = torch.from_numpy(np.random.default_rng(1).random(16_000))
    counts = torch.bincount(draw(weights, numbers), minlength=4).tolist()
    assert counts[1] == 0
    assert counts[0] == pytest.approx(2000, abs=150)
    assert counts[2] == pytest.approx(4000, abs=200)
