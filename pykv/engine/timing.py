"""When a request waited, began, got its tokens and stood still, measured where the tokens are made."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykv.engine.histogram import Histogram, HistogramCounts

if TYPE_CHECKING:
    from pykv.engine.request import Request, Sequence
    from pykv.scheduler import RequestSummary

# Seconds; the buckets of vLLM's metrics of the same names, with finer ones below for small models.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
NEXT_TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKEN_BOUNDS = (
    1.0,
    *(2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
    *(1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingCounts:
    """What was measured so far; times in seconds.

    Attributes:
        time_to_first_token: from the submission to a sample's first token.
        inter_token: between two tokens of one sample, stalls included, pauses left out.
        queue_time: from the submission to the first step that computes for a request.
        request_time: from the submission to a request's end.
        stalls_recompute, stalls_swap: how long requests that were preempted stood still; one value a request. A
            request any of whose blocks were copied to the host counts as swapped.
        prompt_tokens, output_tokens: of the requests that have ended, in tokens.
        num_new_tokens: tokens that were sampled and count.
    """

    time_to_first_token: HistogramCounts
    inter_token: HistogramCounts
    queue_time: HistogramCounts
    request_time: HistogramCounts
    stalls_recompute: HistogramCounts
    stalls_swap: HistogramCounts
    prompt_tokens: HistogramCounts
    output_tokens: HistogramCounts
    num_new_tokens: int


class Timing:
    """Measures the requests of one step loop; `counts` from any thread, the others from the thread that steps."""

    def __init__(self) -> None:
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self._next_token = Histogram(NEXT_TOKEN_BOUNDS)
        self._queue = Histogram(FIRST_TOKEN_BOUNDS)
        self._request = Histogram(REQUEST_BOUNDS)
        self._recompute = Histogram(NEXT_TOKEN_BOUNDS)
        self._swap = Histogram(NEXT_TOKEN_BOUNDS)
        self._prompt_tokens = Histogram(TOKEN_BOUNDS)
        self._output_tokens = Histogram(TOKEN_BOUNDS)
        self._num_new_tokens = 0

    def place(self, sequence: Sequence, now: float) -> None:
        """A sequence got a row: for the first time, or because it was preempted since."""
        request = sequence.request
        if request.started_at is None:
            request.started_at = now
            self._queue.observe(now - request.submitted_at)
        if sequence.was_placed:
            sequence.is_resuming = True
        sequence.was_placed = True

    def token(self, sequence: Sequence, now: float) -> None:
        """A sequence got a token that counts."""
        self._num_new_tokens += 1
        before = sequence.token_at
        sequence.token_at = now
        if before is None:
            self._first_token.observe(now - sequence.request.submitted_at)
        else:
            self._next_token.observe(now - before)
        if sequence.is_resuming:
            sequence.is_resuming = False
            self._end_stall(sequence, before, now)

    def resume(self, request: Request, seconds: float) -> None:
        """A request goes on that was paused for so long: no time between two of its tokens, and no stall."""
        for sequence in request.sequences:
            if sequence.token_at is not None:
                sequence.token_at += seconds

    def end(self, request: Request, summary: RequestSummary) -> None:
        """A request has ended, maybe while it stood still."""
        now = time.monotonic()
        for sequence in request.sequences:
            if sequence.is_resuming:
                self._end_stall(sequence, sequence.token_at, now)
        if summary.preemptions:
            stalls = self._swap if summary.swapped_blocks else self._recompute
            stalls.observe(request.stalled_seconds)
        self._request.observe(now - request.submitted_at)
        self._prompt_tokens.observe(summary.prompt_tokens)
        self._output_tokens.observe(summary.output_tokens)

    def counts(self) -> TimingCounts:
        """What was measured so far."""
        return TimingCounts(
            time_to_first_token=self._first_token.counts(),
            inter_token=self._next_token.counts(),
            queue_time=self._queue.counts(),
            request_time=self._request.counts(),
            stalls_recompute=self._recompute.counts(),
            stalls_swap=self._swap.counts(),
            prompt_tokens=self._prompt_tokens.counts(),
            output_tokens=self._output_tokens.counts(),
            num_new_tokens=self._num_new_tokens,
        )

    @staticmethod
    def _end_stall(sequence: Sequence, before: float | None, now: float) -> None:
        """A reader saw nothing since the last token; before the first, the wait counts from the request's start."""
        request = sequence.request
        since = before if before is not None else request.started_at
        request.stalled_seconds += 0.0 if since is None else now - since
