"""Makes the deltas of one step."""

from __future__ import annotations

from dataclasses import replace

from pykv.engine.outputs import OutputDelta, Usage
from pykv.engine.request import Request, Sequence
from pykv.sampling.token_logprobs import TokenLogprobs
from pykv.scheduler import RequestSummary

RequestDelta = tuple[Request, OutputDelta]


class StepDeltas:
    """The deltas of one step, in order; a request's usage is put on its last one."""

    def __init__(self) -> None:
        self.items: list[RequestDelta] = []
        self._last: dict[Request, int] = {}

    def add(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        """Appends what is new in one sequence; its text is taken from it."""
        request = sequence.request
        text, sequence.text = sequence.text, ""
        prompt_logprobs = _take_prompt_logprobs(request)
        delta = OutputDelta(
            request.request_id,
            sequence.index,
            token_ids,
            text,
            logprobs,
            prompt_logprobs,
            sequence.finish_reason,
            sequence.stop_reason,
            None,
            sequence.error,
            None if prompt_logprobs is None else tuple(map(int, request.prompt)),
        )
        self._last[request] = len(self.items)
        self.items.append((request, delta))

    def end(self, request: Request, summary: RequestSummary) -> list[Sequence]:
        """Ends the sequences of the request that still run and puts its usage on its last delta.

        Returns:
            The sequences that were ended here.
        """
        reason = "abort" if summary.aborted else "error"
        ended = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in ended:
            if reason == "error":
                sequence.error = sequence.error or _any_error(request)
            sequence.finish(reason)
            self.add(sequence, ())
        if request not in self._last:
            self.add(request.sequences[-1], ())
        place = self._last[request]
        self.items[place] = (request, replace(self.items[place][1], usage=_usage(request, summary)))
        return ended


def raised_within(error: BaseException) -> str:
    """Says what was raised, in few words."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def _any_error(request: Request) -> str | None:
    """A sample that never began fails with the one that computed the prompt for it."""
    return next((sequence.error for sequence in request.sequences if sequence.error), None)


def _take_prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    if request.prompt_scores is None:
        return None
    scores, request.prompt_scores = request.prompt_scores, None
    return scores.entries()


def _usage(request: Request, summary: RequestSummary) -> Usage:
    return Usage(
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        output_tokens=summary.output_tokens,
        preemptions=summary.preemptions,
        recomputed_tokens=summary.recomputed_tokens,
        swapped_blocks=summary.swapped_blocks,
        stalled_ms=max(request.stalled_seconds, summary.stalled_seconds) * 1e3
        if summary.preemptions
        else 0.0,
    )
