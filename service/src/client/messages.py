"""Between the messages of the protocol and the objects of pykv, on the side of the client."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from grpclib.const import Status

from pykv.engine.histogram import HistogramCounts
from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.errors import InvalidRequestError
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.service.client.failures import ServiceError
from pykv.service.messages import FINISH_REASONS
from pykv.service.protocol import engine_pb2 as pb

__all__ = ["FINISH_WORDS", "deltas_of", "histogram_of", "retention_message", "sampling_message"]

FINISH_WORDS: Mapping[int, str] = {value: word for word, value in FINISH_REASONS.items()}


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The message that asks for `params`."""
    values = {entry.name: getattr(params, entry.name) for entry in fields(params)}
    return pb.SamplingParams(**values)


def retention_message(retention: Retention | None) -> pb.Retention | None:
    """The message that says how long a request's blocks matter.

    Raises:
        InvalidRequestError: the session's id is no UTF-8.
    """
    if retention is None:
        return None
    return pb.Retention(
        session_id=_text_of(retention.session_id or ""),
        ttl_seconds=retention.ttl_seconds,
        next_turn_seconds=retention.next_turn_seconds,
        priority=retention.priority,
    )


def _text_of(session_id: bytes | str) -> str:
    try:
        return session_id.decode() if isinstance(session_id, bytes) else session_id
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"session_id is {session_id!r}: allowed over the wire is UTF-8", "session_id"
        ) from None


def deltas_of(
    response: pb.GenerateResponse, request_id: str, prompt_logprobs: Sequence[pb.TokenLogprobs]
) -> list[OutputDelta]:
    """A message's deltas; `prompt_logprobs`, if any, comes with the first, the usage with the last."""
    usage = _usage_of(response.usage) if response.HasField("usage") else None
    last = len(response.deltas) - 1
    return [
        _delta_of(message, request_id, () if place else prompt_logprobs, usage if place == last else None)
        for place, message in enumerate(response.deltas)
    ]


def histogram_of(message: pb.Histogram) -> HistogramCounts:
    """A histogram's counts.

    Raises:
        ServiceError: it has not one bucket more than bounds; none of either is a histogram that the server has not.
    """
    num_bounds, num_counts = len(message.bounds), len(message.counts)
    if num_counts != num_bounds + 1 and (num_bounds or num_counts):
        problem = f"the server sent a histogram of {num_bounds} bounds and {num_counts} counts"
        raise ServiceError(f"{problem}: allowed is one count more", Status.INTERNAL.name)
    return HistogramCounts(tuple(message.bounds), tuple(message.counts), message.total)


def _delta_of(
    message: pb.Delta,
    request_id: str,
    prompt_logprobs: Sequence[pb.TokenLogprobs],
    usage: Usage | None,
) -> OutputDelta:
    stop = message.WhichOneof("stop_reason")
    logprobs = tuple(entry for entry in map(_logprobs_of, message.logprobs) if entry is not None)
    return OutputDelta(
        request_id=request_id,
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=logprobs or None,
        prompt_logprobs=tuple(map(_logprobs_of, prompt_logprobs)) or None,
        prompt_token_ids=tuple(entry.token_id for entry in prompt_logprobs) or None,
        finish_reason=FINISH_WORDS.get(message.finish_reason),
        stop_reason=None if stop is None else getattr(message, stop),
        usage=usage,
        error=message.error or None,
    )


def _logprobs_of(message: pb.TokenLogprobs) -> TokenLogprobs | None:
    if not message.rank:
        return None
    return TokenLogprobs(
        message.token_id,
        message.logprob,
        message.rank,
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
    )


def _usage_of(message: pb.Usage) -> Usage:
    return Usage(**{entry.name: getattr(message, entry.name) for entry in fields(Usage)})
