"""TLS: certificates of both sides, read again while calls go on; plain text stays on loopback."""

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl

import pytest
from hyperframe.frame import GoAwayFrame

from pykv.client import Client, ServiceError, tls_context
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams
from pykv.service.options import ServeOptions
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.tls import TlsFiles
from pykv.service.transport.server import CLOSE_SECONDS, HANDSHAKE_SECONDS

pytestmark = pytest.mark.asyncio

SHORT = SamplingParams(max_tokens=3)
HOST = "127.0.0.1"


async def one_answer(client, collect):
    return [token for delta in await collect(client.generate([5], SHORT)) for token in delta.token_ids]


async def test_a_client_that_knows_the_authority_is_served(start_tls, authority, collect):
    daemon = await start_tls()
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        assert await one_answer(client, collect) == [6, 7, 8]
        assert await client.health() == "SERVING"


async def test_a_client_that_does_not_know_the_authority_refuses(start_tls):
    daemon = await start_tls()
    async with Client(daemon.address, tls=tls_context()) as client:
        with pytest.raises(ServiceError, match=r"certificate of the server .* is not trusted"):
            await client.get_model()


async def test_plain_text_to_a_port_with_tls_is_not_answered(start_tls):
    daemon = await start_tls()
    async with Client(daemon.address) as client:
        with pytest.raises(ServiceError):
            await client.get_model()


@pytest.mark.parametrize("auth", ["required", "optional"])
async def test_client_certificates_are_asked_for(
    start_tls, authority, make_authority, collect, auth, tmp_path
):
    daemon = await start_tls(tls_client_ca=str(authority.file), tls_client_auth=auth)
    certificate = authority.issue("client", "client.test")
    async with Client(daemon.address, tls=tls_context(authority.file, *certificate)) as client:
        assert await one_answer(client, collect) == [6, 7, 8]
    stranger = make_authority(tmp_path / "other").issue("client", "client.test")
    async with Client(daemon.address, tls=tls_context(authority.file, *stranger)) as client:
        with pytest.raises(ServiceError):
            await client.get_model()
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        if auth == "optional":
            assert await one_answer(client, collect) == [6, 7, 8]
        else:
            with pytest.raises(ServiceError):
                await client.get_model()


async def test_a_hangup_renews_the_certificate_and_calls_go_on(
    start_tls, authority, make_authority, tmp_path, collect, eventually
):
    daemon = await start_tls()
    renewed = make_authority(tmp_path / "new")
    new_chain, new_key = renewed.issue("server", HOST)
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        stream = client.generate([5], SamplingParams(max_tokens=100_000))
        await anext(stream)
        os.replace(new_chain, tmp_path / "server.chain.pem")
        os.replace(new_key, tmp_path / "server.key.pem")
        os.kill(os.getpid(), signal.SIGHUP)

        async def is_renewed():
            async with Client(daemon.address, tls=tls_context(renewed.file)) as other:
                try:
                    return await other.health() == "SERVING"
                except ServiceError:
                    return False

        await eventually(is_renewed)
        async with Client(daemon.address, tls=tls_context(authority.file)) as late:
            with pytest.raises(ServiceError):
                await late.health()
        assert await anext(stream)
        await stream.aclose()


async def test_files_that_became_bad_change_nothing(start_tls, authority, tmp_path, collect, caplog):
    daemon = await start_tls()
    (tmp_path / "server.key.pem").write_text("no key")
    await daemon.daemon.reload()
    assert "reload refused" in caplog.text
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        assert await one_answer(client, collect) == [6, 7, 8]


async def test_handshakes_in_progress_count_as_connections_and_must_come_to_an_end(
    start_tls, authority, collect, eventually
):
    daemon = await start_tls(max_connections=20, max_connections_per_peer=10, request_timeout=1.0)
    server = daemon.daemon._server
    streams = [await asyncio.open_connection(*daemon.address.split(":")) for _ in range(30)]
    for _, writer in streams[:5]:
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a hello

    async def are_counted():
        return server.num_connections + server.num_refused.get("max_connections_per_peer", 0) == 30

    await eventually(are_counted)
    assert server.num_connections == 10
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        with pytest.raises(ServiceError):
            await client.health()
        async with asyncio.timeout(10):
            assert [await reader.read() for reader, _ in streams] == [b""] * 30

        async def have_left():
            return server.num_connections == 0

        await eventually(have_left)
        assert await one_answer(client, collect) == [6, 7, 8]
        assert server.num_connections == 1
    for _, writer in streams:
        writer.close()


async def test_nothing_is_kept_of_handshakes_that_failed(start_tls, eventually):
    daemon = await start_tls()
    server = daemon.daemon._server
    for _ in range(5):
        reader, writer = await asyncio.open_connection(*daemon.address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()

    async def have_left():
        return server.num_connections == 0

    await eventually(have_left)
    assert not server._handlers


async def test_a_handshake_that_has_begun_may_end_during_the_drain_and_its_calls_are_served(
    start_tls, authority, raw_over, framed, eventually
):
    daemon = await start_tls(drain_timeout=20.0)
    server = daemon.daemon._server
    reader, writer = await asyncio.open_connection(*daemon.address.split(":"))

    async def is_accepted():
        return server.num_connections == 1

    async def is_leaving():
        return server._goodbye_seconds is not None

    await eventually(is_accepted)
    daemon.engine.hold()
    stopping = asyncio.create_task(daemon.stop())
    await eventually(is_leaving)
    await writer.start_tls(tls_context(authority.file), server_hostname=HOST)
    connection = raw_over(reader, writer)
    connection.h2._frame_dispatch_table[GoAwayFrame] = lambda frame: ([], [frame])  # h2 would close
    sampling = pb.SamplingParams(max_tokens=3)
    request = framed(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling))
    served = connection.request("/pykv.v1.Engine/Generate", request)
    await connection.flush()
    assert [(await connection.wait_for(GoAwayFrame)).last_stream_id for _ in range(2)] == [2**31 - 1, served]
    daemon.engine.release()
    assert (await connection.status(served))[0] == 0
    await stopping
    await connection.close()


async def test_a_handshake_that_does_not_go_on_holds_the_end_up_no_longer_than_the_drain(
    start_tls, eventually
):
    daemon = await start_tls(drain_timeout=0.3)
    reader, writer = await asyncio.open_connection(*daemon.address.split(":"))

    async def is_accepted():
        return daemon.daemon._server.num_connections == 1

    await eventually(is_accepted)
    async with asyncio.timeout(HANDSHAKE_SECONDS / 2):
        await daemon.stop()
        assert await reader.read() == b""
    writer.close()


async def test_a_reload_for_which_no_file_can_be_opened_says_so_and_can_be_repeated(
    start_tls, authority, make_authority, tmp_path, collect, eventually, caplog, no_more_files
):
    caplog.set_level(logging.INFO)
    daemon = await start_tls()
    renewed = make_authority(tmp_path / "new")
    for old, new in zip(("server.chain.pem", "server.key.pem"), renewed.issue("server", HOST), strict=True):
        os.replace(new, tmp_path / old)

    async def is_refused():
        return "reload refused" in caplog.messages

    async def is_reloaded():
        return "reloaded" in caplog.messages

    with no_more_files():
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(is_refused, seconds=5.0)
    refusal = next(record for record in caplog.records if record.getMessage() == "reload refused")
    assert "tls_cert" in refusal.error
    assert os.strerror(errno.EMFILE) in refusal.error
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        assert await one_answer(client, collect) == [6, 7, 8]
    os.kill(os.getpid(), signal.SIGHUP)
    await eventually(is_reloaded, seconds=5.0)
    async with Client(daemon.address, tls=tls_context(renewed.file)) as client:
        assert await one_answer(client, collect) == [6, 7, 8]


@pytest.mark.parametrize("name", ["load_cert_chain", "load_verify_locations"])
async def test_a_file_that_can_be_opened_once_only_is_named(authority, monkeypatch, name):
    """Files may run out between the look at a file and the reading of it."""
    chain, key = authority.issue("server", HOST)

    def no_file(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ssl.SSLContext, name, no_file)
    with pytest.raises(ConfigError, match="cannot be used: Too many open files"):
        TlsFiles(chain, key, authority.file).read()


async def test_an_end_amid_handshakes_comes(start_tls, eventually):
    daemon = await start_tls()
    reader, writer = await asyncio.open_connection(*daemon.address.split(":"))

    async def is_counted():
        return daemon.daemon._server.num_connections == 1

    await eventually(is_counted)
    async with asyncio.timeout(5):
        await daemon.stop()
        assert await reader.read() == b""
    writer.close()


async def test_a_client_that_never_answers_the_goodbye_of_tls_does_not_hold_the_end_up(
    start_tls, authority, monkeypatch, eventually
):
    monkeypatch.setattr("pykv.service.transport.writer.LINGER_SECONDS", 0.05)
    daemon = await start_tls()
    host, port = daemon.address.split(":")

    def connect():
        return tls_context(authority.file).wrap_socket(
            socket.create_connection((host, int(port))), server_hostname=host
        )

    with await asyncio.to_thread(connect):

        async def has_begun():
            return len(daemon.daemon._server._connections) == 1

        await eventually(has_begun)
        async with asyncio.timeout(CLOSE_SECONDS / 2):
            await daemon.stop()


async def test_an_end_with_open_connections_comes(start_tls, authority):
    daemon = await start_tls()
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        stream = client.generate([5], SamplingParams(max_tokens=100_000))
        await anext(stream)
        await daemon.daemon.reload()
        async with asyncio.timeout(10):
            await daemon.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, ["0.0.0.0", "--tls-cert", "--insecure-bind"]),
        ({"tls_cert": "x"}, ["tls_key"]),
        ({"tls_client_ca": "x"}, ["tls_client_ca", "tls_cert"]),
    ],
)
async def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ConfigError) as refusal:
        ServeOptions(**options)
    assert all(word in str(refusal.value) for word in words)


async def test_beyond_loopback_tls_needs_no_flag():
    assert ServeOptions(host="0.0.0.0", tls_cert="x", tls_key="y").tls_files is not None


async def test_files_that_cannot_be_used_are_named(authority, tmp_path):
    chain, key = authority.issue("server", HOST)
    other_chain, other_key = authority.issue("other", HOST)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    for files, words in (
        (TlsFiles(tmp_path / "missing.pem", key), "missing.pem cannot be read"),
        (TlsFiles(chain, other_key), "KEY_VALUES_MISMATCH"),
        (TlsFiles(garbage, key), "garbage.pem"),
        (TlsFiles(chain, key, garbage), "tls_client_ca"),
    ):
        with pytest.raises(ConfigError, match=words):
            files.read()
    assert TlsFiles(other_chain, other_key).read().context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(authority, tmp_path):
    from cryptography.hazmat.primitives import serialization

    chain, key = authority.issue("server", HOST)
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="passphrase"):
        TlsFiles(chain, locked).read()
