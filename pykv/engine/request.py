"""One request and its samples, as the engine keeps them while they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.engine.prompt_scores import PromptScores
from pykv.sampling.params import SamplingParams
from pykv.sampling.row_parameters import Placement
from pykv.scheduler import OUTCOME_OK, OUTCOME_STOP
from pykv.text.text_stream import TextStream

TokenIds = npt.NDArray[np.int32]


class Request:
    """One request.

    Attributes:
        request_id: as the caller knows it.
        prompt: int32 [num_prompt_tokens].
        params: how it is sampled.
        seed: of its random numbers.
        ending_token_ids: sampling one of these ends a sample.
        new_text: makes the text stream of a sample; None where there is no tokenizer.
        sequences: its samples, by index.
        prompt_scores: the prompt's log probabilities so far, if they were asked for.
        receiver: whom the asynchronous engine hands its deltas to.
        id: the scheduler's number, set once it was taken.
        num_cached_tokens: how many tokens of its prompt it found cached; None before its first token or its end.
        submitted_at, started_at: on the monotonic clock, in seconds; when it was made, and when it first got a row.
        stalled_seconds: how long its samples stood still after preemptions, added up.
    """

    __slots__ = (
        "ending_token_ids",
        "id",
        "new_text",
        "num_cached_tokens",
        "params",
        "prompt",
        "prompt_scores",
        "receiver",
        "request_id",
        "seed",
        "sequences",
        "stalled_seconds",
        "started_at",
        "submitted_at",
    )

    def __init__(
        self,
        request_id: str,
        prompt: TokenIds,
        params: SamplingParams,
        seed: int,
        eos_token_ids: frozenset[int],
        new_text: Callable[[], TextStream | None],
    ) -> None:
        self.id = -1
        self.num_cached_tokens: int | None = None
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        ending = frozenset(params.stop_token_ids)
        self.ending_token_ids = ending if params.ignore_eos else ending | eos_token_ids
        self.new_text = new_text
        self.sequences = [Sequence(self, index) for index in range(params.n)]
        count = params.prompt_logprobs
        self.prompt_scores = None if count is None else PromptScores(prompt, count)
        self.receiver: Any = None
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        self.stalled_seconds = 0.0


class Sequence:
    """One sample of a request.

    Attributes:
        index: which of the request's samples.
        output_token_ids: so far.
        text: what the last token released.
        finish_reason: None while it runs.
        stop_reason: the stop string or stop token that was met.
        error: what went wrong, if something did.
        token_at: when it got its last token, on the monotonic clock, in seconds.
        was_placed, is_resuming: whether it ever got a row; whether it got one again and no token since.
    """

    __slots__ = (
        "_text_stream",
        "error",
        "finish_reason",
        "index",
        "is_resuming",
        "output_token_ids",
        "request",
        "stop_reason",
        "text",
        "token_at",
        "was_placed",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.output_token_ids: list[int] = []
        self.text = ""
        self._text_stream = request.new_text()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.token_at: float | None = None
        self.was_placed = self.is_resuming = False

    def placement(self) -> Placement:
        """Returns what the sampler must know when the sequence gets a row."""
        request = self.request
        return Placement(
            request.params,
            request.seed,
            self.index,
            request.prompt,
            self.output_token_ids,
            request.ending_token_ids,
        )

    def advance(self, token_id: int) -> int:
        """Takes the token that was sampled; returns OUTCOME_OK, or OUTCOME_STOP where it ends here."""
        self.output_token_ids.append(token_id)
        self.text = ""
        if token_id in self.request.ending_token_ids:
            self.stop_reason = token_id if token_id in self.request.params.stop_token_ids else None
            self.text = self._flushed()
            return OUTCOME_STOP
        if self._text_stream is None:
            return OUTCOME_OK
        self.text, stop = self._text_stream.push(token_id)
        if stop is None:
            return OUTCOME_OK
        self.stop_reason = stop
        self._text_stream = None
        return OUTCOME_STOP

    def retract(self) -> None:
        """Takes the last token back; the tokens before it are decoded again."""
        self.output_token_ids.pop()
        self.decode_again()

    def decode_again(self) -> None:
        """Makes the text's state anew, from the tokens that count; what went wrong with a later one is forgotten."""
        self.text, self.stop_reason, self.error = "", None, None
        self._text_stream = self.request.new_text()
        if self._text_stream is not None:
            for token_id in self.output_token_ids:
                self._text_stream.push(token_id)

    def finish(self, reason: str) -> None:
        """Ends the sequence; the text that was held back is added to what the last token released."""
        self.finish_reason = reason
        self.text += self._flushed()

    def _flushed(self) -> str:
        stream, self._text_stream = self._text_stream, None
        return "" if stream is None else stream.flush()
