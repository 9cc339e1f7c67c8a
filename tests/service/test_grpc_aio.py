"""The clients of gRPC's own library are served as pykv's are."""

import asyncio

import pytest

from pykv.service.protocol import engine_pb2 as pb

grpc = pytest.importorskip("grpc", reason="needs grpcio (extra dev)")

pytestmark = pytest.mark.asyncio


def asking(num_tokens, **values):
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling, **values)


def generate(channel):
    return channel.unary_stream(
        "/pykv.v1.Engine/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )


def token_ids(response):
    return [token for delta in response.deltas for token in delta.token_ids]


async def test_a_stream_arrives_whole(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        call = generate(channel)(asking(40))
        assert [token async for response in call for token in token_ids(response)] == list(range(6, 46))
        assert await call.code() is grpc.StatusCode.OK


async def test_two_hundred_streams_run_on_one_channel(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:

        async def count():
            return sum([len(token_ids(response)) async for response in generate(channel)(asking(10))])

        assert await asyncio.gather(*(count() for _ in range(200))) == [10] * 200


async def test_a_refusal_has_its_status_its_text_and_its_field(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await generate(channel)(asking(0)).read()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in failure.value.details()
    assert dict(failure.value.trailing_metadata())["pykv-field"] == "max_tokens"


async def test_cancelling_ends_the_request(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        call = generate(channel)(asking(100_000))
        await call.read()
        call.cancel()
        await daemon.engine.until(lambda: daemon.engine.aborted)


async def test_a_deadline_ends_the_request(daemon):
    daemon.engine.hold()
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await generate(channel)(asking(10), timeout=0.1).read()
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await daemon.engine.until(lambda: daemon.engine.aborted)


async def test_a_call_in_flight_ends_whole_during_the_drain(start_daemon):
    daemon = await start_daemon(drain_timeout=20.0)
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        call = generate(channel)(asking(50))
        responses = aiter(call)
        seen = token_ids(await anext(responses))
        daemon.engine.hold()
        stopping = asyncio.create_task(daemon.stop())
        await asyncio.sleep(0.3)  # past both goodbyes
        daemon.engine.release()
        seen += [token async for response in responses for token in token_ids(response)]
        assert seen == list(range(6, 56))
        await stopping
