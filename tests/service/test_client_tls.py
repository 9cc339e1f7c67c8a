"""A client whose TLS is not the server's is told what is the matter, by `pykv.Client` and by the commands."""

import asyncio
import socket
import ssl
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from socket import SHUT_RDWR, SHUT_WR, create_server

import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError, StreamClosedError
from hyperframe.frame import GoAwayFrame, SettingsFrame

from pykv.cli.main import main
from pykv.client import Client, ServiceError, tls_context
from pykv.errors import ConfigError
from pykv.service.client.tls_failures import why_ended, why_not_connected, why_unreadable

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


@asynccontextmanager
async def raw_server(said=b""):
    """A server that says these bytes once it was spoken to."""

    async def answer(reader, writer):
        await reader.read(16)
        if said:
            writer.write(said)
            writer.write_eof()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def test_plain_text_to_a_port_with_tls_is_told_that_it_may_want_tls(start_tls, capsys):
    daemon = await start_tls()
    assert await reason(daemon.address) == MAY_WANT_TLS
    assert await of_commands(capsys, daemon.address) == f"{MAY_WANT_TLS}; see --tls and --tls-ca"


@pytest.mark.parametrize("alert", [bytes.fromhex("15030100020246"), bytes.fromhex("15030100020246") * 2])
async def test_plain_text_that_is_answered_by_an_alert_is_told_that_the_server_speaks_tls(alert, capsys):
    words = "the server speaks TLS, and was spoken to in plain text"
    async with raw_server(alert) as address:
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


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (
            ssl.TLSVersion.TLSv1_2,
            "the server at {} ended the TLS handshake: sslv3 alert handshake failure; "
            "it may want a certificate of the client",
        ),
        (ssl.TLSVersion.TLSv1_3, "the server ended TLS: tlsv13 alert certificate required"),
    ],
)
async def test_the_alert_of_a_server_is_told_in_openssls_words(authority, capsys, version, words):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(*authority.issue("server", HOST))
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    with openssl_server(context) as address:
        found = await reason(address, tls_context(authority.file))
        assert found == words.format(address)
        told = await of_commands(capsys, address, "--tls-ca", authority.file)
        assert told == f"{found}; see --tls-cert and --tls-key"


@pytest.mark.parametrize(
    ("code", "words"), [(70, "tlsv1 alert protocol version"), (112, "tlsv1 unrecognized name")]
)
async def test_an_alert_that_is_of_no_certificate_sends_nobody_to_one(capsys, code, words):
    async with raw_server(bytes((21, 3, 3, 0, 2, 2, code))) as address:
        found = await reason(address, tls_context())
        assert found == f"the server at {address} ended the TLS handshake: {words}"
        assert await of_commands(capsys, address, "--tls") == found


async def test_a_port_that_does_not_answer_the_handshake_is_told_so(monkeypatch):
    monkeypatch.setattr(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", 0.05)
    async with raw_server() as address:
        words = "did not answer the TLS handshake in time; it may speak plain text"
        assert await reason(address, tls_context()) == f"the server at {address} {words}"


@pytest.mark.parametrize("host", ["certificate.example", "TLS"])
@pytest.mark.parametrize("arguments", [(), ("--tls",)])
async def test_a_host_that_is_called_after_tls_is_no_trouble_with_it(capsys, monkeypatch, host, arguments):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = await of_commands(capsys, f"{host}:50051", *arguments)
    assert told.startswith(f"no server answers at {host}:50051: ")
    assert "see --" not in told


async def test_words_of_a_server_are_no_trouble_with_tls(capsys):
    goodbye = GoAwayFrame(0, 0, ErrorCodes.INTERNAL_ERROR, b"TLS certificate").serialize()
    async with raw_server(SettingsFrame().serialize() + goodbye) as address:
        told = await of_commands(capsys, address)
        assert told == "the server closed the connection: INTERNAL_ERROR, b'TLS certificate'"


async def test_a_record_that_cannot_be_decrypted_is_no_word_of_the_server():
    error = ssl.SSLError(ssl.SSL_ERROR_SSL, "")
    error.reason = "DECRYPTION_FAILED_OR_BAD_RECORD_MAC"
    words = "decryption failed or bad record mac"
    assert why_ended(error, b"", is_tls=True) == (f"TLS with the server broke: {words}", None)
    no_tls = f"no TLS with the server at a:1: {words}", None
    assert why_not_connected(error, "a:1", is_tls=True) == no_tls


async def test_the_class_of_an_error_tells_whether_its_text_is_a_stream():
    assert why_unreadable(ProtocolError("7"), b"").text == "the server broke HTTP/2: 7"
    stream = "the server broke HTTP/2: a frame on the stream 7, which is not open"
    assert why_unreadable(StreamClosedError(7), b"").text == stream


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
        ((5,), "authorities 5 cannot be used: cafile should be a valid filesystem path"),
        (("a\0b",), "authorities a\0b cannot be used: embedded null"),
        ((authority.file, "a\0b"), "certificate a\0b cannot be used: embedded null"),
        ((authority.file, chain, "\ud800"), f"certificate {chain} and key \ud800 cannot be used: "),
    ):
        with pytest.raises(ConfigError) as refusal:
            tls_context(*arguments)
        assert str(refusal.value).startswith(words)
    assert await asyncio.to_thread(main, ["chat", "--address", f"{HOST}:1", "--tls-key", str(key)]) == 2
    assert "key is given without certificate" in capsys.readouterr().err
