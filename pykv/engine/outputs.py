"""What the engine gives back: deltas while a request runs, and whole outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykv.sampling.token_logprobs import TokenLogprobs

__all__ = ["Completion", "OutputDelta", "RequestOutput", "TokenLogprobs", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request took, over all its samples.

    Attributes:
        prompt_tokens, cached_tokens, output_tokens: the cached ones are those of the prompt that were in the cache when
            the request started first.
        preemptions: how often a sample lost its blocks to others and was brought back.
        recomputed_tokens: tokens that were computed after a preemption though the sample had held their keys and values
            before, computed or found in the cache.
        swapped_blocks: blocks that were kept on the host meanwhile.
        stalled_ms: how long its samples stood still because of that, in sum, in milliseconds: from the last token
            before a preemption to the next one.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int = 0
    stalled_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new in one sample of one request.

    Attributes:
        request_id: as given by the caller, or drawn.
        index: which of the request's n samples.
        token_ids: the new tokens, in order.
        text: the new text; never ends inside a character and never holds a part of a stop string.
        logprobs: one for each of `token_ids`, if asked for.
        prompt_logprobs: on the request's first delta, one a prompt token (None for the first), if asked for.
        finish_reason: on the sample's last delta: "stop", "length", "abort" or "error".
        stop_reason: the stop string or the stop token that ended the sample; None for EOS.
        usage: on the request's last delta.
        error: what went wrong, where finish_reason is "error".
        prompt_token_ids: with `prompt_logprobs`, the tokens that these are of.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Completion:
    """One finished sample of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One finished request: its samples, in the order of their indexes, and what it took."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, delta: OutputDelta) -> None:
        """Appends one delta of this request."""
        completion = self.outputs[delta.index]
        completion.token_ids.extend(delta.token_ids)
        completion.text += delta.text
        if delta.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or ()), *delta.logprobs]
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            completion.error = delta.error
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.usage = delta.usage or self.usage
