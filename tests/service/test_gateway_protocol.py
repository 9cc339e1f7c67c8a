"""The gateway's protocol, beside pykv's own on the same port."""

import asyncio
import hashlib
import io
import zipfile

import grpc
import pytest
import pytest_asyncio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pykv.client import Client
from pykv.errors import InvalidRequestError
from pykv.sampling import SamplingParams
from pykv.service.gateway.messages import params_of, prompt_of
from pykv.service.tokenizer_archive import tokenizer_archive

pytestmark = pytest.mark.asyncio

RESOURCE_EXHAUSTED = 8


@pytest.fixture
def open_stub():
    """Opens the gateway's own stub on a daemon: `async with open_stub(daemon) as stub`."""

    class Opened:
        def __init__(self, daemon):
            self.channel = grpc.aio.insecure_channel(daemon.address)

        async def __aenter__(self):
            return vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

        async def __aexit__(self, *_):
            await self.channel.close()

    return Opened


@pytest_asyncio.fixture
async def stub(daemon, open_stub):
    async with open_stub(daemon) as stub:
        yield stub


def asking(token_ids=(5,), *, stream=True, request_id="", **sampling):
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=token_ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def read(call):
    async with asyncio.timeout(20):
        return [response async for response in call]


async def test_a_stream_sends_chunks_and_then_the_end_of_each_sample(stub):
    responses = await read(stub.Generate(asking(max_tokens=4, n=2)))
    tokens = {0: [], 1: []}
    for response in responses:
        if response.HasField("chunk"):
            tokens[response.chunk.index] += response.chunk.token_ids
            assert response.chunk.completion_tokens == len(response.chunk.token_ids)
            assert response.chunk.prompt_tokens == 1
    ends = [response.complete for response in responses if response.HasField("complete")]
    assert tokens == {0: [6, 7, 8, 9], 1: [7, 8, 9, 10]}
    assert [(end.index, end.finish_reason, end.completion_tokens) for end in ends] == [
        (0, "length", 4),
        (1, "length", 4),
    ]


async def test_a_request_that_is_not_streamed_gets_each_sample_whole(stub):
    responses = await read(stub.Generate(asking(max_tokens=4, n=2, stream=False, logprobs=2)))
    assert all(response.HasField("complete") for response in responses)
    assert [list(response.complete.output_ids) for response in responses] == [[6, 7, 8, 9], [7, 8, 9, 10]]
    assert responses[0].complete.prompt_tokens == 1
    logprobs = responses[0].complete.output_logprobs
    assert list(logprobs.token_ids) == [6, 7, 8, 9]
    assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[0, 1]] * 4


async def test_both_protocols_give_the_same_tokens(start_daemon, make_real_engine, open_stub, collect):
    daemon = await start_daemon(make_real_engine())
    params = {"max_tokens": 12, "seed": 7, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
    async with open_stub(daemon) as stub, Client(daemon.address) as client:
        ours = await collect(client.generate([40, 41, 42], SamplingParams(**params)))
        (theirs,) = await read(stub.Generate(asking([40, 41, 42], stream=False, **params)))
        assert list(theirs.complete.output_ids) == [token for delta in ours for token in delta.token_ids]


async def test_abort_ends_a_stream_with_its_reason(stub, engine):
    call = stub.Generate(asking(max_tokens=100_000, request_id="mine"))
    reading = asyncio.create_task(read(call))
    await engine.until(lambda: engine.live)
    await stub.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]))
    responses = await reading
    assert responses[-1].complete.finish_reason == "abort"
    assert not engine.live


async def test_a_call_that_is_cancelled_ends_its_request(stub, engine):
    call = stub.Generate(asking(max_tokens=100_000))
    await call.read()
    call.cancel()
    await engine.until(lambda: not engine.live)
    assert len(engine.aborted) == 1


async def test_the_model_the_server_and_its_load_are_told(stub, description):
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size) == ("stub", description.vocab_size)
    assert model.max_context_length == description.max_model_len
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.block_size, server.active_requests) == ("vllm-grpc", 16, 0)
    call = stub.Generate(asking(max_tokens=100_000))
    await call.read()
    (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.token_usage) == (1, 0.001)
    assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 1
    call.cancel()


async def test_counts_of_the_whole_daemon_are_for_operators(start_daemon, open_stub, tmp_path):
    tenants = tmp_path / "tenants.toml"
    entries = [
        f'[tenants.{name}]\ntoken_sha256 = ["{hashlib.sha256(name.encode()).hexdigest()}"]\noperator = {operator}'
        for name, operator in (("operations", "true"), ("bolt", "false"))
    ]
    tenants.write_text("\n".join(entries))
    daemon = await start_daemon(tenants=str(tenants))
    operations, bolt = ([("authorization", f"Bearer {name}")] for name in ("operations", "bolt"))
    async with open_stub(daemon) as stub:
        call = stub.Generate(asking(max_tokens=100_000), metadata=operations)
        await call.read()
        assert (await stub.GetLoads(pb.GetLoadsRequest(), metadata=operations)).loads[0].num_running_reqs == 1
        with pytest.raises(grpc.aio.AioRpcError, match="no operator") as refusal:
            await stub.GetLoads(pb.GetLoadsRequest(), metadata=bolt)
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        for caller, num_active in ((operations, 1), (bolt, 0)):
            server = await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=caller)
            assert server.active_requests == num_active
        call.cancel()


async def test_a_request_that_the_engine_refuses_costs_its_tenant_nothing(start_daemon, open_stub, tmp_path):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        f'[tenants.slow]\ntoken_sha256 = ["{hashlib.sha256(b"slow").hexdigest()}"]\n'
        "tokens_per_second = 1\nburst_tokens = 30"
    )
    daemon = await start_daemon(tenants=str(tenants))
    daemon.engine.num_running_max = 0
    slow = [("authorization", "Bearer slow")]
    async with open_stub(daemon) as stub:
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError, match="samples wait"):
                await read(stub.Generate(asking([5] * 20), metadata=slow))
        daemon.engine.num_running_max = 1
        await read(stub.Generate(asking([5] * 20, max_tokens=2), metadata=slow))


async def test_health_is_readiness(stub, daemon):
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    daemon.daemon._health.set_unready()
    assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_tokenizer_is_sent_as_an_archive_that_is_always_the_same(
    start_daemon, tiny_runner, open_stub
):
    runner, tokenizer = tiny_runner
    daemon = await start_daemon(archive=lambda: tokenizer_archive(tokenizer, runner.config))
    async with open_stub(daemon) as stub:
        chunks = await read(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        again = await read(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest() == again[-1].sha256
    names = set(zipfile.ZipFile(io.BytesIO(archive)).namelist())
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names


@pytest.mark.parametrize("has_tenants", [True, False])
async def test_who_reads_the_tokenizer_slowly_leaves_room_to_others(
    start_daemon, raw_open, framed, tmp_path, has_tenants
):
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("slow", "quick")}
    file = tmp_path / "tenants.toml"
    file.write_text("".join(f'[tenants.{name}]\ntoken_sha256 = ["{digests[name]}"]\n' for name in digests))
    options = {"tenants": str(file)} if has_tenants else {}
    daemon = await start_daemon(archive=lambda: b"a" * 300_000, **options)
    path, request = "/vllm.grpc.engine.VllmEngine/GetTokenizer", framed(common_pb2.GetTokenizerRequest())

    async def begin(connection, name, count):
        credential = [("authorization", f"Bearer {name}")]
        calls = [connection.request(path, request, more_headers=credential) for _ in range(count)]
        await connection.flush()
        return [await connection.begun(call) for call in calls], calls

    slow = [await raw_open(daemon.address, 1024) for _ in range(3)]
    statuses = [(await begin(connection, "slow", 64))[0] for connection in slow]
    refusal = "too many read the tokenizer: allowed is 64 in all, and of those a fair part"
    assert {status for each in statuses for status in each} == {(0, ""), (RESOURCE_EXHAUSTED, refusal)}
    assert [each.count((0, "")) for each in statuses] == [22, 7, 2]
    quick = await raw_open(daemon.address, 2**20)
    _, calls = await begin(quick, "quick", 4 if has_tenants else 1)
    for call in calls:
        assert (await quick.status(call))[0] == 0
    for connection in (*slow, quick):
        await connection.close()


@pytest.mark.parametrize(
    ("request_message", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (asking([2**31]), "prompt"),
        (asking(temperature=-1), "temperature"),
        (asking(logprobs=-1), "logprobs"),
        (asking(json_schema="{}"), "json_schema"),
        (asking(truncate_prompt_tokens=3), "truncate_prompt_tokens"),
        (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
        (pb.GenerateRequest(text="a", media_refs=pb.MediaRefs()), "media_refs"),
        (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(stub, request_message, field):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await read(stub.Generate(request_message))
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in refusal.value.details()


async def test_other_methods_say_that_they_are_not_served(stub):
    for method, request in (
        (stub.Embed, pb.EmbedRequest()),
        (stub.FlushCache, common_pb2.FlushCacheRequest()),
        (stub.StartProfile, common_pb2.StartProfileRequest()),
        (stub.StopProfile, common_pb2.StopProfileRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await method(request)
        assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError):
        await read(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))


async def test_fields_that_are_zero_have_their_defaults():
    assert params_of(pb.SamplingParams()) == SamplingParams()
    params = params_of(pb.SamplingParams(temperature=0.7, top_p=0.95, seed=-1, n=3, logit_bias={5: 0.1}))
    assert (params.temperature, params.top_p, params.seed, params.n) == (0.7, 0.95, 2**64 - 1, 3)
    assert params.logit_bias == {5: 0.1}
    with pytest.raises(InvalidRequestError):
        params_of(pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a"])))


async def test_a_text_is_taken_too():
    assert prompt_of(pb.GenerateRequest(text="a b")) == "a b"


async def test_the_tokenizer_is_packed_once_and_its_readers_count(start_daemon, open_stub, tmp_path):
    made = []

    def make():
        made.append(1)
        return bytes(100_000)

    tenants = tmp_path / "tenants.toml"
    digest = hashlib.sha256(b"one").hexdigest()
    tenants.write_text(f'[tenants.one]\ntoken_sha256 = ["{digest}"]\nmax_in_flight = 1')
    daemon = await start_daemon(archive=make, tenants=str(tenants))
    one = [("authorization", "Bearer one")]
    async with open_stub(daemon) as stub:
        for _ in range(2):
            chunks = await read(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=one))
            assert b"".join(chunk.data for chunk in chunks) == bytes(100_000)
            assert chunks[-1].sha256 == hashlib.sha256(bytes(100_000)).hexdigest()
        assert made == [1]
        running = stub.Generate(asking(max_tokens=100_000), metadata=one)
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError, match="calls in flight: allowed is 1"):
            await read(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=one))
        running.cancel()
