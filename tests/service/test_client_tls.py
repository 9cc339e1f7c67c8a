"""A client whose TLS is not the server's is told what is the matter, by `pykv.Client` and by the commands."""

import asyncio
import ssl
import threading
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR, SHUT_WR, create_server

import pytest

from pykv.cli.main import main
from pykv.client import Client, ServiceError, tls_context
from pykv.errors import ConfigError

pytestmark = pytest.mark.asyncio

HOST = "127.0.0.1"
MAY_WANT_TLS = "the server closed the connection before HTTP/2 began: it may want TLS"
MAY_WANT_CERTIFICATE = "it may want a certificate of the client, of an authority that it trusts"
COMMANDS = (["chat"], ["top", "--once"])


async def reason(address, tls=None):
    async with Client(address, tls=tls) as client:
        with pytest.raises(ServiceError) as error:
            await client.get_model()
        with pytest.raises(ServiceError) as of_stream:
            await anext(client.generate("a"))
    assert error.value.status == of_stream.value.status == "UNAVAILABLE"
    assert str(error.value) == str(of_stream.value)
    return str(error.value).removeprefix("UNAVAILABLE: ")


async def of_commands(capsys, address, *arguments):
    """What the commands refuse with; it is the same."""
    said = set()
    for command in COMMANDS:
        options = [*command, "--address", address, *map(str, arguments)]
        assert await asyncio.to_thread(main, options) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        said.add(captured.err.removeprefix("pykv: UNAVAILABLE: ").rstrip())
    (line,) = said
    return line


@contextmanager
def openssl_server(context):
    """A server that makes connections by OpenSSL itself, which sends its alerts, and says no word of HTTP/2."""
    with create_server((HOST, 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                tls = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with tls, suppress(OSError):
                    with suppress(ssl.SSLError):
                        tls.do_handshake()
                    tls.shutdown(SHUT_WR)  # what was not read would have it reset, and the alert be lost
                    while tls.recv(4096):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "{}:{}".format(*listening.getsockname())
        listening.shutdown(SHUT_RDWR)
    thread.join(5)


async def test_plain_text_to_a_port_with_tls_is_told_that_it_may_want_tls(start_tls, capsys):
    daemon = await start_tls()
    assert await reason(daemon.address) == MAY_WANT_TLS
    assert await of_commands(capsys, daemon.address) == f"{MAY_WANT_TLS}; see --tls and --tls-ca"


@pytest.mark.parametrize("alert", [bytes.fromhex("15030100020246"), bytes.fromhex("15030100020246") * 2])
async def test_plain_text_that_is_answered_by_an_alert_is_told_that_the_server_speaks_tls(alert, capsys):
    async def answer(reader, writer):
        await reader.read(16)
        writer.write(alert)
        writer.write_eof()
        await reader.read()
        writer.close()

    words = "the server speaks TLS, and was spoken to in plain text"
    async with await asyncio.start_server(answer, HOST, 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        assert await reason(address) == words
        assert await of_commands(capsys, address) == f"{words}; see --tls and --tls-ca"


async def test_an_unknown_authority_is_told_in_openssls_words(start_tls, make_authority, tmp_path, capsys):
    daemon = await start_tls()
    stranger = make_authority(tmp_path / "other").file
    words = f"the certificate of the server at {daemon.address} is not trusted: certificate verify failed: "
    found = await reason(daemon.address, tls_context(stranger))
    assert found.startswith(words)
    assert "issuer" in found or "self-signed" in found
    told = await of_commands(capsys, daemon.address, "--tls-ca", stranger)
    assert told.startswith(words)
    assert told.endswith("; see --tls-ca")
    assert (await of_commands(capsys, daemon.address, "--tls")).startswith(words)


async def test_a_certificate_for_another_name_is_told_with_the_name(start_tls, authority, capsys):
    address = (await start_tls()).address.replace(HOST, "localhost")
    words = "certificate verify failed: Hostname mismatch, certificate is not valid for 'localhost'"
    assert words in await reason(address, tls_context(authority.file))
    assert words in await of_commands(capsys, address, "--tls-ca", authority.file)


async def test_tls_to_a_port_in_plain_text_is_told_that_it_may_be_one(start_daemon, authority, capsys):
    address = (await start_daemon()).address
    words = f"no TLS with the server at {address}: wrong version number; it may speak plain text"
    assert await reason(address, tls_context(authority.file)) == words
    assert (await of_commands(capsys, address, "--tls")).startswith(words)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("shows", ["nothing", "a stranger's"])
async def test_a_client_without_the_certificate_that_is_asked_for_is_told_that_one_may_be(
    start_tls, authority, make_authority, tmp_path, version, shows
):
    daemon = await start_tls(tls_client_ca=str(authority.file))
    stranger = make_authority(tmp_path / "other").issue("client", "client.test")
    context = tls_context(authority.file, *(() if shows == "nothing" else stranger))
    context.maximum_version = version
    found = await reason(daemon.address, context)
    assert found.endswith("want a certificate of the client, of an authority that it trusts")


async def test_the_commands_name_the_options_of_a_certificate_that_may_be_wanted(
    start_tls, authority, capsys
):
    daemon = await start_tls(tls_client_ca=str(authority.file))
    told = await of_commands(capsys, daemon.address, "--tls-ca", authority.file)
    assert told.endswith(f"{MAY_WANT_CERTIFICATE}; see --tls-cert and --tls-key")


async def test_the_alert_of_a_server_is_told_in_openssls_words(authority, capsys):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(*authority.issue("server", HOST))
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with openssl_server(context) as address:
        found = await reason(address, tls_context(authority.file))
        assert found == "the server ended TLS: tlsv13 alert certificate required"
        told = await of_commands(capsys, address, "--tls-ca", authority.file)
        assert told == f"{found}; see --tls-cert and --tls-key"


async def test_where_nobody_listens_nothing_is_said_of_tls(capsys, authority):
    with create_server((HOST, 0)) as listening:
        address = "{}:{}".format(*listening.getsockname())
    for arguments in ((), ("--tls-ca", authority.file)):
        told = await of_commands(capsys, address, *arguments)
        assert told.startswith(f"no server answers at {address}: ")
        assert "see --" not in told


async def test_files_that_cannot_be_used_are_named(authority, tmp_path, capsys):
    chain, key = authority.issue("client", "client.test")
    _, other_key = authority.issue("other", "other.test")
    missing, junk = tmp_path / "missing.pem", tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for arguments, words in (
        ((missing,), f"authorities {missing} cannot be used: No such file or directory"),
        ((junk,), f"authorities {junk} cannot be used: "),
        ((authority.file, missing, key), f"certificate {missing} and key {key} cannot be used: No such file"),
        (
            (authority.file, chain, other_key),
            f"certificate {chain} and key {other_key} cannot be used: KEY_VALUES",
        ),
        ((authority.file, chain), f"certificate {chain} cannot be used: "),
        ((authority.file, None, key), "key is given without certificate"),
    ):
        with pytest.raises(ConfigError) as refusal:
            tls_context(*arguments)
        assert str(refusal.value).startswith(words)
    assert await asyncio.to_thread(main, ["chat", "--address", f"{HOST}:1", "--tls-key", str(key)]) == 2
    assert "key is given without certificate" in capsys.readouterr().err
