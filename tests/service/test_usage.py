"""What each sample of a request is told that it took: streamed or whole, in either protocol, however it ends."""

import asyncio
from contextlib import nullcontext

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as gateway_pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from pykv.client import Client, ServiceError
from pykv.engine.request import Sequence
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

TEXT = "the same text for all of them, some blocks long, of which the last is not full"
UNTIL_LETTERS = {"stop": ["a", "e", "i", "o"], "max_tokens": 60, "ignore_eos": True}
UNTIL_LENGTH = {"max_tokens": 6, "ignore_eos": True}
UNTIL_ABORT = {"max_tokens": 3000, "ignore_eos": True}


class Gateway:
    """Calls of the gateway's protocol on a daemon."""

    def __init__(self, daemon):
        self._channel = grpc.aio.insecure_channel(daemon.address)
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._channel.close()

    async def generate(self, prompt, *, stream, ends=None, **options):
        """All chunks, and the ends of the samples by their index, which `ends` gets as they come."""
        request = gateway_pb.GenerateRequest(request_id="r", stream=stream)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)
        request.sampling_params.CopyFrom(gateway_pb.SamplingParams(seed=7, temperature=1.0, **options))
        chunks, ends = [], {} if ends is None else ends
        async with asyncio.timeout(20):
            async for response in self.stub.Generate(request):
                if response.HasField("chunk"):
                    chunks.append(response.chunk)
                else:
                    ends[response.complete.index] = response.complete
        return chunks, ends

    async def abort(self, engine, eventually):
        """Ends the request once all of its samples run."""

        async def is_running():
            return engine.stats().num_running == 3

        await eventually(is_running)
        await self.stub.Abort(gateway_pb.AbortRequest(request_ids=["r"]))


def told(ends):
    """What the ends of the samples say, but for how far each one came."""
    return [
        (index, end.finish_reason, end.prompt_tokens, end.cached_tokens, end.matched_stop_str)
        for index, end in sorted(ends.items())
    ]


@pytest.mark.parametrize("options", [UNTIL_LETTERS, UNTIL_LENGTH], ids=["stop", "length"])
@pytest.mark.parametrize("prompt", [TEXT, [*range(10, 110)]], ids=["text", "ids"])
async def test_a_stream_says_of_each_sample_what_the_whole_answer_says(
    start_daemon, make_real_engine, prompt, options
):
    daemon = await start_daemon(make_real_engine())
    async with Gateway(daemon) as gateway:
        await gateway.generate(prompt, stream=False, max_tokens=1)
        _, whole = await gateway.generate(prompt, stream=False, n=3, **options)
        chunks, streamed = await gateway.generate(prompt, stream=True, n=3, **options)
    num_cached = (len(prompt) - 1) // 16 * 16
    assert {(end.prompt_tokens, end.cached_tokens) for end in whole.values()} == {(len(prompt), num_cached)}
    assert told(streamed) == told(whole)
    assert [streamed[index].completion_tokens for index in range(3)] == [
        whole[index].completion_tokens for index in range(3)
    ]
    assert {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks} == {(len(prompt), num_cached)}
    if options is UNTIL_LETTERS:
        assert len({end.completion_tokens for end in whole.values()}) > 1  # some ended before the request


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_says_it_of_each_sample_too(start_daemon, make_real_engine, eventually, stream):
    engine = make_real_engine()
    daemon = await start_daemon(engine)
    async with Gateway(daemon) as gateway:
        await gateway.generate(TEXT, stream=False, max_tokens=1)
        answer = asyncio.create_task(gateway.generate(TEXT, stream=stream, n=3, **UNTIL_ABORT))
        await gateway.abort(engine, eventually)
        _, ends = await answer
    num_cached = (len(TEXT) - 1) // 16 * 16
    assert told(ends) == [(index, "abort", len(TEXT), num_cached, "") for index in range(3)]


@pytest.fixture
def fail_at(monkeypatch):
    """Makes one sample fail at a token: `fail_at(index, place)`."""

    def fail(index, place):
        advance = Sequence.advance

        def advance_or_fail(self, token_id):
            if self.index == index and len(self.output_token_ids) == place:
                self.output_token_ids.append(token_id)
                raise ValueError("no such text")
            return advance(self, token_id)

        monkeypatch.setattr(Sequence, "advance", advance_or_fail)

    return fail


async def test_a_stream_whose_sample_failed_says_it_of_the_others(start_daemon, make_real_engine, fail_at):
    daemon = await start_daemon(make_real_engine())
    fail_at(1, 2)
    ends = {}
    async with Gateway(daemon) as gateway:
        await gateway.generate(TEXT, stream=False, max_tokens=1)
        with pytest.raises(grpc.aio.AioRpcError, match="no such text"):
            await gateway.generate(TEXT, stream=True, n=3, ends=ends, **UNTIL_LENGTH)
    num_cached = (len(TEXT) - 1) // 16 * 16
    assert told(ends) == [(index, "length", len(TEXT), num_cached, "") for index in (0, 2)]


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
async def test_the_other_protocol_says_it_once_for_each_reason_to_finish(
    start_daemon, make_real_engine, fail_at, reason
):
    daemon = await start_daemon(make_real_engine())
    options = {"stop": UNTIL_LETTERS, "abort": UNTIL_ABORT}.get(reason, UNTIL_LENGTH)
    params = SamplingParams.from_mapping(
        {**options, "stop": tuple(options.get("stop", ())), "n": 3, "seed": 7}
    )
    if reason == "error":
        fail_at(1, 2)
    deltas = []

    async def read(client):
        async for delta in client.generate(TEXT, params, request_id="r"):
            deltas.append(delta)
            if reason == "abort" and len(deltas) == 3:
                await client.abort("r")

    async with Client(daemon.address) as client:
        await anext(client.generate(TEXT, SamplingParams(max_tokens=1)))
        with pytest.raises(ServiceError, match="no such text") if reason == "error" else nullcontext():
            await read(client)
    (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
    assert deltas[-1].usage is usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (len(TEXT), (len(TEXT) - 1) // 16 * 16)
    assert usage.output_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert {delta.finish_reason for delta in deltas} - {None, "length"} <= {reason}


async def test_each_place_of_a_prompt_names_its_token_and_the_first_has_no_probability(
    start_daemon, make_real_engine
):
    daemon = await start_daemon(make_real_engine())
    prompt = [5, 6, 7, 8]
    async with Gateway(daemon) as gateway:
        (chunk, *_), _ = await gateway.generate(prompt, stream=True, max_tokens=2, prompt_logprobs=1)
        _, ends = await gateway.generate(prompt, stream=False, max_tokens=2, prompt_logprobs=1)
        for of_input in (chunk.input_logprobs, ends[0].input_logprobs):
            assert list(of_input.token_ids) == prompt
            assert [entry.HasField("value") for entry in of_input.token_logprobs] == [False, True, True, True]
            assert [len(top.token_ids) for top in of_input.top_logprobs] == [0, 1, 1, 1]
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        generate = channel.unary_stream(
            "/pykv.v1.Engine/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        sampling = pb.SamplingParams(max_tokens=2, prompt_logprobs=1)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        of_prompt = [entry async for response in generate(request) for entry in response.prompt_logprobs]
    assert [entry.token_id for entry in of_prompt] == prompt
    assert [bool(entry.rank) for entry in of_prompt] == [False, True, True, True]
