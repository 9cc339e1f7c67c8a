"""Tenants: who calls is known by a token or a certificate, and nobody gets at another's cache, requests or share."""

import asyncio
import hashlib
import logging
from contextlib import suppress

import pytest
import trustme
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpclib.client import UnaryStreamMethod
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_bin_value
from smg_grpc_proto import vllm_engine_pb2 as vllm

from pykv.client import Client, ServiceError, tls_context
from pykv.errors import ConfigError, DuplicateRequestError, EngineDeadError, QueueFullError
from pykv.sampling import SamplingParams
from pykv.service.access import Tenant
from pykv.service.client.channel import PatientChannel
from pykv.service.protocol.engine_pb2 import GenerateRequest, TokenIds

GENERATE = "/pykv.v1.Engine/Generate"
SHORT = SamplingParams(max_tokens=3, temperature=0)
LONG = SamplingParams(max_tokens=100_000)
GATEWAY_GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = f"""
[tenants.acme]
token_sha256 = ["{digest("acme-secret")}"]
max_in_flight = 2
operator = true
scope = "acme-and-partners"

[tenants.bolt]
token_sha256 = ["{digest("bolt-secret")}", "{digest("bolt-other-secret")}"]
certificates = ["bolt.test"]

[tenants.partner-of-acme]
token_sha256 = ["{digest("partner-secret")}"]
scope = "acme-and-partners"
"""


@pytest.fixture
def tenants_file(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def start_for_tenants(start_daemon, tenants_file):
    async def start(engine=None, **options):
        return await start_daemon(engine, tenants=str(tenants_file), **options)

    return start


def named(daemon, token=None):
    return Client(daemon.address, token=token)


@pytest.mark.asyncio
@pytest.mark.parametrize("token", [None, "", "wrong", "acme-secret2"])
async def test_without_a_tenants_token_there_is_only_health(start_for_tenants, token):
    daemon = await start_for_tenants()
    if token == "":
        with pytest.raises(ConfigError, match="token"):
            named(daemon, token)
        return
    async with named(daemon, token) as client:
        assert await client.health() == "SERVING"
        for call in (client.get_model(), client.get_stats(), client.abort("x"), anext(client.generate([5]))):
            with pytest.raises(ServiceError) as refusal:
                await call
            assert refusal.value.status == "UNAUTHENTICATED"
    assert not daemon.engine.scopes


@pytest.mark.asyncio
async def test_reflection_needs_a_credential_too(start_for_tenants):
    from grpclib.reflection.v1.reflection_grpc import ServerReflectionStub
    from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

    daemon = await start_for_tenants()
    host, port = daemon.address.split(":")
    channel = PatientChannel(host, int(port))
    request = ServerReflectionRequest(list_services="")
    try:
        with pytest.raises(GRPCError, match="credential"):
            await ServerReflectionStub(channel).ServerReflectionInfo([request])
        headers = {"authorization": "Bearer bolt-secret"}
        (reply,) = await ServerReflectionStub(channel).ServerReflectionInfo([request], metadata=headers)
        assert "pykv.v1.Engine" in [service.name for service in reply.list_services_response.service]
    finally:
        channel.close()


@pytest.mark.asyncio
async def test_a_call_of_reflection_counts_as_its_tenants(start_for_tenants, raw_open, framed):
    from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

    daemon = await start_for_tenants()
    raw = await raw_open(daemon.address)
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    asked, token = framed(ServerReflectionRequest(list_services="")), ("authorization", "Bearer acme-secret")
    streams = [raw.request(path, asked, end_stream=False, more_headers=[token]) for _ in range(3)]
    await raw.flush()
    assert await raw.status(streams[2]) == (8, "tenant acme has 2 calls in flight: allowed is 2")
    raw.h2.end_stream(streams[0])
    await raw.flush()
    assert (await raw.status(streams[0]))[0] == 0
    after = raw.request(path, asked, more_headers=[token])
    await raw.flush()
    assert (await raw.status(after))[0] == 0
    await raw.close()


@pytest.mark.asyncio
async def test_each_token_of_a_tenant_is_served_in_its_scope(start_for_tenants, collect):
    daemon = await start_for_tenants()
    for place, token in enumerate(["bolt-secret", "bolt-other-secret", "acme-secret", "partner-secret"]):
        async with named(daemon, token) as client:
            deltas = await collect(client.generate([5], SHORT, request_id=f"r{place}", cache_salt=b"s"))
            assert deltas[0].request_id == f"r{place}"
    scopes = {name.split("/")[0]: scope for name, scope in daemon.engine.scopes.items()}
    assert scopes["acme"] == scopes["partner-of-acme"] != scopes["bolt"]
    assert set(daemon.engine.tenants.values()) == {b"acme", b"bolt", b"partner-of-acme"}


@pytest.mark.asyncio
async def test_nobody_hits_the_cache_of_another_tenant_whatever_salt_is_sent(
    start_for_tenants, make_real_engine, collect
):
    daemon = await start_for_tenants(make_real_engine())
    prompt = "a" * 512

    async def cached(token, salt=b""):
        async with named(daemon, token) as client:
            deltas = await collect(client.generate(prompt, SHORT, cache_salt=salt))
            return deltas[-1].usage.cached_tokens

    acme = read_tenants_of(daemon)["acme"]
    assert await cached("acme-secret", b"salt") == 0
    assert await cached("acme-secret", b"salt") == 496
    for salt in (b"salt", b"", acme.scope_of(b"salt"), b"acme" + b"salt"):
        assert await cached("bolt-secret", salt) == 0
    assert await cached("acme-secret", b"other salt") == 0
    assert await cached("partner-secret", b"salt") == 496


def read_tenants_of(daemon):
    return {account.tenant.name: account.tenant for account in daemon.daemon._gate.accounts()}


@pytest.mark.asyncio
async def test_two_tenants_may_use_one_name_and_abort_only_their_own(start_for_tenants):
    daemon = await start_for_tenants()
    daemon.engine.hold()
    async with named(daemon, "acme-secret") as acme, named(daemon, "bolt-secret") as bolt:
        streams = [each.generate([5], LONG, request_id="x") for each in (acme, bolt)]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await daemon.engine.until(lambda: len(daemon.engine.live) == 2)
        assert await bolt.abort("x")
        assert not await bolt.abort("acme/x")
        aborted = {name: channel.is_aborted for name, channel in daemon.engine.live.items()}
        assert aborted == {"acme/x": False, "bolt/x": True}
        daemon.engine.release()
        await asyncio.gather(*waiting)
        assert [delta async for delta in streams[1]][-1].finish_reason == "abort"
        assert (await anext(streams[0])).finish_reason is None
        await streams[0].aclose()


@pytest.mark.asyncio
async def test_a_name_that_is_taken_is_told_as_its_tenant_wrote_it(start_for_tenants):
    daemon = await start_for_tenants()
    daemon.engine.hold()
    host, port = daemon.address.split(":")
    channel = PatientChannel(host, int(port))
    async with named(daemon, "acme-secret") as acme:
        stream = acme.generate("hello", LONG, request_id="job")
        waiting = asyncio.create_task(anext(stream))
        await daemon.engine.until(lambda: "acme/job" in daemon.engine.live)
        with pytest.raises(DuplicateRequestError) as refusal:
            await anext(acme.generate("hello", LONG, request_id="job"))
        theirs = vllm.GenerateRequest(request_id="job", text="hello", stream=True)
        theirs.sampling_params.max_tokens = 5
        method = UnaryStreamMethod(channel, GATEWAY_GENERATE, vllm.GenerateRequest, vllm.GenerateResponse)
        with pytest.raises(GRPCError) as their_refusal:
            await method(theirs, metadata={"authorization": "Bearer acme-secret"})
        daemon.engine.release()
        await waiting
        await stream.aclose()
    channel.close()
    assert their_refusal.value.status.name == "ALREADY_EXISTS"
    assert str(refusal.value) == their_refusal.value.message == "request_id 'job' is live already"


@pytest.mark.asyncio
async def test_counts_of_the_whole_daemon_are_for_operators(start_for_tenants):
    daemon = await start_for_tenants()
    async with named(daemon, "acme-secret") as client:
        assert (await client.get_stats())["blocks_total"] == 1000
    async with named(daemon, "bolt-secret") as client:
        with pytest.raises(ServiceError, match="no operator") as refusal:
            await client.get_stats()
        assert refusal.value.status == "PERMISSION_DENIED"


@pytest.mark.asyncio
async def test_a_certificate_stands_for_its_tenant(start_for_tenants, tmp_path, collect):
    authority = trustme.CA()
    files = {name: str(tmp_path / f"{name}.pem") for name in ("authority", "server", "key")}
    authority.cert_pem.write_to_path(files["authority"])
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(files["key"])
    issued.cert_chain_pems[0].write_to_path(files["server"])
    daemon = await start_for_tenants(
        tls_cert=files["server"], tls_key=files["key"], tls_client_ca=files["authority"]
    )
    for name in ("bolt.test", "stranger.test"):
        issued = authority.issue_cert(name)
        issued.private_key_and_cert_chain_pem.write_to_path(
            files[name] if name in files else str(tmp_path / name)
        )
        context = tls_context(files["authority"], tmp_path / name)
        async with Client(daemon.address, tls=context) as client:
            if name == "bolt.test":
                await collect(client.generate([5], SHORT))
                assert list(daemon.engine.tenants.values()) == [b"bolt"]
            else:
                with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
                    await client.get_model()
        async with Client(daemon.address, tls=context, token="acme-secret") as client:
            await client.get_model()  # a token says more than a certificate
        async with Client(daemon.address, tls=context, token="wrong") as client:
            with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
                await client.get_model()


@pytest.mark.asyncio
async def test_calls_in_flight_are_capped_by_tenant_with_a_hint_when_to_come_again(
    start_for_tenants, collect
):
    daemon = await start_for_tenants()
    async with named(daemon, "acme-secret") as acme, named(daemon, "bolt-secret") as bolt:
        streams = [acme.generate([5], LONG) for _ in range(2)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        with pytest.raises(ServiceError, match="2 calls in flight: allowed is 2") as refusal:
            await anext(acme.generate([5], LONG))
        assert (refusal.value.status, refusal.value.retry_seconds) == ("RESOURCE_EXHAUSTED", 1.0)
        await collect(bolt.generate([5], SHORT))
        await streams[0].aclose()
        await daemon.engine.until(lambda: len(daemon.engine.live) == 1)
        await asyncio.sleep(0)
        await collect(acme.generate([5], SHORT))
        await streams[1].aclose()


@pytest.mark.asyncio
async def test_a_refusal_carries_retry_info_in_its_details(
    start_for_tenants, tenants_file, collect, raw_open, framed
):
    tenants_file.write_text(
        f'[tenants.slow]\ntoken_sha256 = ["{digest("s")}"]\ntokens_per_second = 10\nburst_tokens = 20'
    )
    daemon = await start_for_tenants()
    async with named(daemon, "s") as client:
        await collect(client.generate([5] * 10, SamplingParams(max_tokens=50)))
        with pytest.raises(ServiceError, match="10 tokens/s") as refusal:
            await anext(client.generate([5], SHORT))
        assert 2.0 < refusal.value.retry_seconds < 5.0
    raw = await raw_open(daemon.address)
    asked = framed(GenerateRequest(token_ids=TokenIds(ids=[5])))
    stream_id = raw.request(GENERATE, asked, more_headers=[("authorization", "Bearer s")])
    await raw.flush()
    assert (await raw.status(stream_id))[0] == 8
    trailers = raw.trailers[stream_id]
    (detail,) = Status.FromString(decode_bin_value(trailers["grpc-status-details-bin"].encode())).details
    hint = RetryInfo()
    assert detail.Unpack(hint)
    assert 2000 < hint.retry_delay.ToMilliseconds() == int(trailers["retry-after-ms"])
    await raw.close()


@pytest.fixture
def start_for_slow(start_for_tenants, tenants_file):
    """A daemon for one tenant, `s`, with few tokens."""

    async def start(burst_tokens):
        tenants_file.write_text(
            f'[tenants.slow]\ntoken_sha256 = ["{digest("s")}"]\ntokens_per_second = 1\n'
            f"burst_tokens = {burst_tokens}"
        )
        return await start_for_tenants()

    return start


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_a_request_that_the_engine_refuses_costs_nothing(start_for_slow, collect, kind):
    daemon = await start_for_slow(30)
    daemon.engine.num_running_max = 0
    async with named(daemon, "s") as client:
        text = "word " * 20
        prompt = text if kind == "generate" else [{"role": "user", "content": text}]
        for _ in range(5):
            with pytest.raises(QueueFullError):
                await collect(getattr(client, kind)(prompt, SHORT))
        daemon.engine.num_running_max = 1
        await collect(getattr(client, kind)(prompt, SHORT))


async def leave(stream, daemon):
    await anext(stream)
    await stream.aclose()
    await daemon.engine.until(lambda: not daemon.engine.live)


async def fail(stream, daemon):
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [leave, fail])
async def test_a_prompt_is_charged_by_its_tokens_however_its_request_ends(start_for_slow, end):
    daemon = await start_for_slow(60)
    prompt = "w " * 100  # estimated at 50 tokens
    if end is fail:
        daemon.engine.scripts[prompt] = [EngineDeadError("the engine has ended")]
    async with named(daemon, "s") as client:
        await end(client.generate(prompt, LONG), daemon)
        with pytest.raises(ServiceError, match="1 tokens/s"):
            await anext(client.generate([5], SHORT))


def test_details_are_those_of_google_rpc():
    from pykv.service.status import retry_details

    (info,) = retry_details(1.25)
    status = Status(code=8)
    status.details.add().Pack(info)
    assert (info.retry_delay.seconds, info.retry_delay.nanos) == (1, 250_000_000)
    assert status.details[0].TypeName() == "google.rpc.RetryInfo"


@pytest.mark.asyncio
async def test_tenants_are_read_again_and_keep_what_they_use(
    start_for_tenants, tenants_file, collect, caplog
):
    daemon = await start_for_tenants()
    async with named(daemon, "acme-secret") as acme:
        stream = acme.generate([5], LONG)
        await anext(stream)
        tenants_file.write_text(f'[tenants.acme]\ntoken_sha256 = ["{digest("new")}"]\nmax_in_flight = 1')
        await daemon.daemon.reload()
        assert await anext(stream)
        with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
            await acme.get_model()
        async with named(daemon, "new") as renewed:
            with pytest.raises(ServiceError, match="1 calls in flight"):
                await anext(renewed.generate([5], SHORT))
        tenants_file.write_text("[tenants]")
        await daemon.daemon.reload()
        assert "reload refused" in caplog.text
        async with named(daemon, "new") as renewed:
            await renewed.get_model()
        await stream.aclose()


@pytest.mark.asyncio
async def test_the_calls_of_a_revoked_tenant_end_and_no_others(start_for_tenants, tenants_file):
    daemon = await start_for_tenants()
    async with named(daemon, "acme-secret") as acme, named(daemon, "bolt-secret") as bolt:
        streams = [each.generate([5], LONG) for each in (acme, bolt, bolt)]
        await asyncio.gather(*(anext(stream) for stream in streams[:2]))
        daemon.engine.hold()
        waiting = asyncio.create_task(anext(streams[2]))
        await daemon.engine.until(lambda: len(daemon.engine.live) == 3)
        tenants_file.write_text(f'[tenants.acme]\ntoken_sha256 = ["{digest("acme-secret")}"]')
        await daemon.daemon.reload()
        await daemon.engine.until(lambda: len(daemon.engine.live) == 1)
        daemon.engine.release()
        for ended in (waiting, read_all(streams[1])):
            with pytest.raises(ServiceError, match="tenant bolt was revoked") as refusal:
                await ended
            assert refusal.value.status == "UNAUTHENTICATED"
        await anext(streams[0])
        await streams[0].aclose()


async def read_all(stream):
    async for _ in stream:
        pass


@pytest.mark.asyncio
async def test_a_tenant_that_comes_back_owes_what_it_owed(start_for_slow, tenants_file, collect):
    daemon = await start_for_slow(20)
    text = tenants_file.read_text()
    async with named(daemon, "s") as client:
        await collect(client.generate([5] * 100, SHORT))
        for content in (TENANTS, text):
            tenants_file.write_text(content)
            await daemon.daemon.reload()
        with pytest.raises(ServiceError, match="1 tokens/s"):
            await collect(client.generate([5], SHORT))


@pytest.mark.asyncio
async def test_a_first_limit_begins_with_a_full_bucket(start_for_tenants, tenants_file, collect):
    daemon = await start_for_tenants()
    async with named(daemon, "acme-secret") as client:
        await collect(client.generate([5], SHORT))
        tenants_file.write_text(
            f'[tenants.acme]\ntoken_sha256 = ["{digest("acme-secret")}"]\ntokens_per_second = 1'
        )
        await daemon.daemon.reload()
        await collect(client.generate([5], SHORT))


@pytest.mark.asyncio
async def test_no_secret_is_logged(start_for_tenants, caplog, collect):
    caplog.set_level(logging.DEBUG, "pykv")  # what libraries say at this level is not logged
    daemon = await start_for_tenants()
    for token in ("acme-secret", "wrong-secret"):
        async with named(daemon, token) as client:
            assert "secret" not in repr(client)
            with suppress(ServiceError):
                await collect(client.generate([5], SHORT))
                await client.get_stats()
    logged = "".join(str(vars(record)) for record in caplog.records)
    assert "'tenant': 'acme'" in logged
    assert "secret" not in logged
    assert digest("acme-secret") not in logged


def test_scopes_are_framed():
    """No name and salt together read as another name with another salt."""
    tenants = [Tenant(name=name, certificates=("c",)) for name in ("a", "ab")]
    tenants += [Tenant(name="other", certificates=("c",), scope=scope) for scope in ("a", "ab")]
    scopes = {tenant.scope_of(salt) for tenant in tenants for salt in (b"", b"b", b"a", b"\0\1a")}
    assert len(scopes) == 16
    assert Tenant(name="third", certificates=("c",), scope="a").scope_of(b"") in scopes


@pytest.mark.asyncio
async def test_calls_that_are_turned_away_unread_give_the_connections_window_back(
    start_for_tenants, open_raw, framed
):
    """More is sent than the window holds: it would be closed for good if what nobody read still counted."""
    daemon = await start_for_tenants(control_frames_burst=10**6)
    connection = await open_raw(address=daemon.address)
    request, count = framed(b"x" * 1024), 5000
    window = connection.h2.outbound_flow_control_window
    assert count * len(request) > window
    for _ in range(count // 50):
        stream_ids = [await connection.send("/pykv.v1.Engine/Generate", request) for _ in range(50)]
        for stream_id in stream_ids:
            assert (await connection.status(stream_id))[0] == 16
        connection.events.clear()
    await connection.close()
