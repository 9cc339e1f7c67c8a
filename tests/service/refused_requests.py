"""Requests that are refused, and the field that the error must name."""

import math

from pykv.service.protocol import engine_pb2 as pb


def with_ids(*ids, **sampling):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling))


REFUSED = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (pb.GenerateRequest(text=""), "prompt"),
    "empty ids": (with_ids(), "prompt"),
    "negative id": (with_ids(-1), "prompt"),
    "id of the vocabulary's size": (with_ids(1000), "prompt"),
    "id beyond 32 bits": (with_ids(2**40), "prompt"),
    "prompt over the cap": (with_ids(*[1] * 200_000), "prompt"),
    "stop token": (with_ids(1, stop_token_ids=[1005]), "stop_token_ids"),
    "logit bias": (with_ids(1, logit_bias={1005: 1.0}), "logit_bias"),
    "max_tokens 0": (with_ids(1, max_tokens=0), "max_tokens"),
    "max_tokens negative": (with_ids(1, max_tokens=-1), "max_tokens"),
    "max_tokens gigantic": (with_ids(1, max_tokens=2**31 - 1), "max_tokens"),
    "temperature NaN": (with_ids(1, temperature=math.nan), "temperature"),
    "temperature negative": (with_ids(1, temperature=-1), "temperature"),
    "temperature infinite": (with_ids(1, temperature=math.inf), "temperature"),
    "top_p 0": (with_ids(1, top_p=0), "top_p"),
    "top_p 2": (with_ids(1, top_p=2), "top_p"),
    "n gigantic": (with_ids(1, n=1_000_000), "n"),
    "n 0": (with_ids(1, n=0), "n"),
    "logprobs of the vocabulary": (with_ids(1, logprobs=1000), "logprobs"),
    "prompt_logprobs of the vocabulary": (with_ids(1, prompt_logprobs=1000), "prompt_logprobs"),
    "10,000 stop texts": (with_ids(1, stop=["x"] * 10_000), "stop"),
    "stop text of 1 MB": (with_ids(1, stop=["x" * 2**20]), "stop"),
    "empty stop text": (with_ids(1, stop=[""]), "stop"),
    "structured output": (with_ids(1, json_schema="{}"), "json_schema"),
    "long name": (pb.GenerateRequest(text="a", request_id="x" * 129), "request_id"),
    "odd name": (pb.GenerateRequest(text="a", request_id="a\nb"), "request_id"),
    "long salt": (pb.GenerateRequest(text="a", cache_salt=b"x" * 257), "cache_salt"),
}
