"""Between the gateway's messages and the engine's objects."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta, TokenLogprobs
from pykv.errors import InvalidRequestError
from pykv.sampling import SamplingParams

__all__ = ["chunk_of", "complete_of", "params_of", "prompt_of"]

PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos"),
    *("temperature", "max_tokens", "logprobs", "prompt_logprobs"),
)
ZERO_IS_UNSET = ("top_p", "repetition_penalty", "n")
NOT_SERVED = (
    *("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs"),
    "extra_mm_inputs",
)


def prompt_of(request: pb.GenerateRequest) -> str | Sequence[int]:
    """The prompt's token ids, or its text.

    Raises:
        InvalidRequestError: there is none, or the request has a part that is not served.
    """
    for field in NOT_SERVED:
        if _is_set(request, field):
            raise InvalidRequestError(f"{field} is not served: allowed is text", field)
    if request.data_parallel_rank:
        message = f"data_parallel_rank is {request.data_parallel_rank}: allowed is 0"
        raise InvalidRequestError(message, "data_parallel_rank")
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("input is missing: allowed is tokenized or text", "input")
    return str(request.text) if kind == "text" else array("q", request.tokenized.input_ids)


def params_of(message: pb.SamplingParams) -> SamplingParams:
    """The parameters that a message sets.

    Raises:
        InvalidRequestError: a value is not allowed, or is of an option that is not served.
    """
    constraint = message.WhichOneof("constraint")
    options: dict[str, Any] = {} if constraint is None else {constraint: True}
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequestError(
            "truncate_prompt_tokens is not served; leave it out", "truncate_prompt_tokens"
        )
    for field in PLAIN:
        if _is_set(message, field):
            options[field] = _without_float32_noise(getattr(message, field))
    for field in ZERO_IS_UNSET:
        if getattr(message, field):
            options[field] = _without_float32_noise(getattr(message, field))
    if message.HasField("seed"):
        options["seed"] = message.seed % 2**64
    options["stop"] = tuple(message.stop)
    options["stop_token_ids"] = tuple(message.stop_token_ids)
    options["logit_bias"] = {
        token: _without_float32_noise(bias) for token, bias in message.logit_bias.items()
    }
    return SamplingParams.from_mapping(options)


def chunk_of(delta: OutputDelta, source: DeltaStream) -> pb.GenerateResponse:
    """What is new in one sample.

    Args:
        source: of the delta; knows the prompt's length.
    """
    chunk = pb.GenerateStreamChunk(
        token_ids=delta.token_ids,
        prompt_tokens=source.num_prompt_tokens or 0,
        completion_tokens=len(delta.token_ids),
        cached_tokens=source.num_cached_tokens or 0,
        index=delta.index,
    )
    if delta.logprobs is not None:
        chunk.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs))
    if delta.prompt_logprobs is not None:
        chunk.input_logprobs.CopyFrom(_input_logprobs(delta.prompt_token_ids or (), delta.prompt_logprobs))
    return pb.GenerateResponse(chunk=chunk)


def complete_of(last: OutputDelta, source: DeltaStream, num_output_tokens: int) -> pb.GenerateResponse:
    """The end of one sample.

    Args:
        last: its last delta, or all of them merged.
        source: of the deltas; knows the prompt's length.
        num_output_tokens: of the whole sample.
    """
    complete = pb.GenerateComplete(
        output_ids=last.token_ids,
        finish_reason=last.finish_reason,
        prompt_tokens=source.num_prompt_tokens or 0,
        completion_tokens=num_output_tokens,
        cached_tokens=source.num_cached_tokens or 0,
        index=last.index,
    )
    if last.logprobs is not None:
        complete.output_logprobs.CopyFrom(_output_logprobs(last.logprobs))
    if last.prompt_logprobs is not None:
        complete.input_logprobs.CopyFrom(_input_logprobs(last.prompt_token_ids or (), last.prompt_logprobs))
    if isinstance(last.stop_reason, str):
        complete.matched_stop_str = last.stop_reason
    elif last.stop_reason is not None:
        complete.matched_token_id = last.stop_reason
    return pb.GenerateResponse(complete=complete)


def _is_set(message: Any, field: str) -> bool:
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return bool(message.HasField(field) if descriptor.has_presence else getattr(message, field))


def _without_float32_noise(value: Any) -> Any:
    """A number that was written with few digits as it was written: 0.7 and not 0.699999988."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _output_logprobs(entries: Iterable[TokenLogprobs]) -> pb.OutputLogProbs:
    message = pb.OutputLogProbs()
    for entry in entries:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.append(entry.logprob)
        message.top_logprobs.append(_top(entry))
    return message


def _input_logprobs(token_ids: Iterable[int], entries: Iterable[TokenLogprobs | None]) -> pb.InputLogProbs:
    message = pb.InputLogProbs()
    for token_id, entry in zip(token_ids, entries, strict=True):
        message.token_ids.append(token_id)
        message.token_logprobs.append(pb.InputTokenLogProb(value=None if entry is None else entry.logprob))
        message.top_logprobs.append(pb.TopLogProbs() if entry is None else _top(entry))
    return message


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_token_ids)
