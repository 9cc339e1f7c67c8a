"""Places of the queue that are held for requests while they are encoded."""

from __future__ import annotations

import pytest

from pykv.errors import QueueFullError
from pykv.sampling import SamplingParams

TWO = SamplingParams(max_tokens=2, n=2)


def hold(engine, num_samples):
    with engine.steps.preparing(num_samples):
        pass


def test_those_that_wait_are_counted_once_between_two_steps(make_toy_engine, monkeypatch):
    engine = make_toy_engine(max_queued_requests=64)
    scheduler, num_counts = engine.steps.scheduler, 0
    count = scheduler.stats

    def counted():
        nonlocal num_counts
        num_counts += 1
        return count()

    monkeypatch.setattr(scheduler, "stats", counted)
    for _ in range(20):
        hold(engine, 1)
        engine.add_request("a", TWO)
    assert num_counts == 1
    engine.step()
    hold(engine, 1)
    assert num_counts == 2


def test_no_more_are_encoded_than_may_wait(make_toy_engine):
    engine = make_toy_engine(max_queued_requests=5, max_num_seqs=4)
    hold(engine, 5)
    first, _ = engine.add_request("a", TWO), engine.add_request("b", TWO)
    hold(engine, 1)
    with pytest.raises(QueueFullError, match="4 samples wait and n is 2: allowed is 5 that wait"):
        hold(engine, 2)
    with engine.steps.preparing(1), pytest.raises(QueueFullError, match="5 samples wait"):
        hold(engine, 1)
    engine.abort(first)
    hold(engine, 3)
    engine.step()  # the other two run
    hold(engine, 5)
