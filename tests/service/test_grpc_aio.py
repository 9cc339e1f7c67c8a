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


def unary(channel, method, request_type, reply_type):
    return channel.unary_unary(
        f"/pykv.v1.Engine/{method}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=reply_type.FromString,
    )


async def test_the_other_methods_answer(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        model = await unary(channel, "GetModel", pb.GetModelRequest, pb.GetModelResponse)(
            pb.GetModelRequest()
        )
        stats = await unary(channel, "GetStats", pb.GetStatsRequest, pb.GetStatsResponse)(
            pb.GetStatsRequest()
        )
        abort = unary(channel, "Abort", pb.AbortRequest, pb.AbortResponse)
        assert (model.name, stats.blocks_total) == ("stub", 1000)
        assert not (await abort(pb.AbortRequest(request_id="unknown"))).aborted
        call = generate(channel)(asking(100_000, request_id="mine"))
        reading = asyncio.create_task(last_of(call))
        await daemon.engine.until(lambda: daemon.engine.live)
        assert (await abort(pb.AbortRequest(request_id="mine"))).aborted
        assert (await reading).deltas[0].finish_reason == pb.FINISH_REASON_ABORT


async def last_of(call):
    async for response in call:
        last = response
    return last


async def test_several_sequences_stream_under_their_indexes(daemon):
    request = asking(6)
    request.sampling.n = 3
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        tokens = {0: [], 1: [], 2: []}
        async for response in generate(channel)(request):
            for delta in response.deltas:
                tokens[delta.index] += delta.token_ids
    assert tokens == {index: list(range(6 + index, 12 + index)) for index in range(3)}


async def test_a_client_that_reads_late_gets_every_token(daemon):
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        call = generate(channel)(asking(10_000))
        await daemon.engine.until(lambda: daemon.engine.finished)
        assert [token async for response in call for token in token_ids(response)] == [
            token % 1000 for token in range(6, 10_006)
        ]


async def test_a_refusal_for_now_says_when_to_come_again(start_daemon):
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    daemon = await start_daemon()
    daemon.engine.num_running_max = 0
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await generate(channel)(asking(1)).read()
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(failure.value.trailing_metadata())
    status, info = Status.FromString(trailers["grpc-status-details-bin"]), RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.code == failure.value.code().value[0]
    assert info.retry_delay.ToMilliseconds() == int(trailers["retry-after-ms"]) >= 100


async def test_tls_and_a_tenants_token(start_daemon, tmp_path):
    import hashlib

    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    digest = hashlib.sha256(b"mine").hexdigest()
    (tmp_path / "tenants.toml").write_text(f'[tenants.me]\ntoken_sha256 = ["{digest}"]')
    daemon = await start_daemon(
        tls_cert=str(tmp_path / "server.pem"),
        tls_key=str(tmp_path / "server.pem"),
        tenants=str(tmp_path / "tenants.toml"),
    )
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with grpc.aio.secure_channel(daemon.address, credentials) as channel:
        call = generate(channel)(asking(3), metadata=[("authorization", "Bearer mine")])
        assert [token async for response in call for token in token_ids(response)] == [6, 7, 8]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await generate(channel)(asking(3), metadata=[("authorization", "Bearer other")]).read()
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
