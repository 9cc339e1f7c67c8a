"""Between the engine and the messages of the protocol, on the side of the daemon."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice, starmap

from pykv.engine.histogram import HistogramCounts
from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.engine.stats import EngineStats
from pykv.engine.timing import TimingCounts
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

__all__ = ["FINISH_REASONS", "HISTOGRAMS", "params_of", "responses_of", "stats_message"]


FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
HISTOGRAMS = ("time_to_first_token", "inter_token", "queue_time", "stalls_recompute", "stalls_swap")
"""Fields of GetStatsResponse, and of what the engine measures."""
ERROR_CHARACTERS = 300
PROMPT_LOGPROBS_A_MESSAGE = 1024


def params_of(message: pb.SamplingParams) -> SamplingParams:
    """The parameters that a message sets; the others have their defaults.

    Raises:
        InvalidRequestError: a value is not allowed, or is of an option that is not served.
    """
    options: dict[str, object] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name == "logit_bias":
            options[descriptor.name] = dict(value)
        elif descriptor.name in ("stop", "stop_token_ids"):
            options[descriptor.name] = tuple(value)
        else:
            options[descriptor.name] = value
    return SamplingParams.from_mapping(options)


def responses_of(delta: OutputDelta, request_id: str) -> Iterator[pb.GenerateResponse]:
    """The messages that carry one delta: one, after some where a long prompt has log probabilities."""
    token_ids, entries = delta.prompt_token_ids or (), delta.prompt_logprobs or ()
    of_prompt = starmap(_prompt_logprobs_message, zip(token_ids, entries, strict=True))
    for _ in range((len(entries) - 1) // PROMPT_LOGPROBS_A_MESSAGE):
        part = islice(of_prompt, PROMPT_LOGPROBS_A_MESSAGE)
        yield pb.GenerateResponse(request_id=request_id, prompt_logprobs=part)
    response = pb.GenerateResponse(
        request_id=request_id, deltas=[_delta_message(delta)], prompt_logprobs=of_prompt
    )
    if delta.usage is not None:
        response.usage.CopyFrom(_usage_message(delta.usage))
    yield response


def stats_message(stats: EngineStats, timing: TimingCounts) -> pb.GetStatsResponse:
    """The engine's counts, and what it measured."""
    counts = {entry.name: getattr(stats, entry.name) for entry in fields(stats)}
    by_reason = counts.pop("num_finished")
    finished = {f"num_finished_{word}": by_reason.get(word, 0) for word in FINISH_REASONS}
    message = pb.GetStatsResponse(**counts, **finished, num_new_tokens=timing.num_new_tokens)
    for name in HISTOGRAMS:
        getattr(message, name).CopyFrom(_histogram_message(getattr(timing, name)))
    return message


def _histogram_message(counts: HistogramCounts) -> pb.Histogram:
    return pb.Histogram(bounds=counts.bounds, counts=counts.counts, total=counts.total)


def _delta_message(delta: OutputDelta) -> pb.Delta:
    message = pb.Delta(index=delta.index, token_ids=delta.token_ids, text=_sendable(delta.text))
    if delta.logprobs is not None:
        message.logprobs.extend(map(_logprobs_message, delta.logprobs))
    if delta.finish_reason is not None:
        _add_end(message, delta)
    return message


def _add_end(message: pb.Delta, last: OutputDelta) -> None:
    message.finish_reason = FINISH_REASONS[last.finish_reason or ""]
    if isinstance(last.stop_reason, str):
        message.stop_text = _sendable(last.stop_reason)
    elif last.stop_reason is not None:
        message.stop_token_id = last.stop_reason
    if last.error is not None:
        message.error = _sendable(last.error[:ERROR_CHARACTERS])


def _sendable(text: str) -> str:
    """The text, with what no UTF-8 can carry replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _logprobs_message(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """The log probabilities of one place."""
    return pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def _prompt_logprobs_message(token_id: int, logprobs: TokenLogprobs | None) -> pb.TokenLogprobs:
    """The log probabilities of one place of a prompt; the first has none."""
    return pb.TokenLogprobs(token_id=token_id) if logprobs is None else _logprobs_message(logprobs)


def _usage_message(usage: Usage) -> pb.Usage:
    """What a request took."""
    return pb.Usage(**{entry.name: getattr(usage, entry.name) for entry in fields(usage)})
