"""The time of certificates, whom they stand for after a change, and handshakes that fail."""

import asyncio
import logging
import re
import socket
import struct
import urllib.request
from datetime import UTC, datetime, timedelta

import pytest
import trustme
import uvloop
from h2.events import StreamReset
from hyperframe.frame import GoAwayFrame
from prometheus_client.parser import text_string_to_metric_families

from pykv.client import Client, ServiceError, tls_context
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams
from pykv.service.certificate import certificates_in, validity_of
from pykv.service.daemon import Daemon
from pykv.service.options import ServeOptions
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.tls import TlsFiles
from pykv.service.transport import HandshakeFailure, departure

HOST = "127.0.0.1"
DAY = timedelta(days=1)
NOW = datetime.now(UTC)
EXPIRED = {"not_before": NOW - 4 * DAY, "not_after": NOW - DAY}
FUTURE = {"not_before": NOW + DAY, "not_after": NOW + 4 * DAY}
SHORT, LONG = SamplingParams(max_tokens=3), SamplingParams(max_tokens=100_000)
EXPIRY = "pykv:tls_certificate_expiry_timestamp_seconds"
LARGEST_STREAM_ID = 2**31 - 1


async def scrape(daemon):
    """Values by the name of the metric and its first label."""

    def read():
        with urllib.request.urlopen(f"http://{daemon.daemon.metrics_address}/metrics", timeout=20) as reply:
            return reply.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    samples = [sample for family in families for sample in family.samples]
    return {(each.name, *list(each.labels.values())[:1]): each.value for each in samples}


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (datetime(1950, 1, 1), datetime(2049, 12, 31, 23, 59, 59)),
        (datetime(2050, 1, 1), datetime(9999, 12, 31)),
    ],
)
def test_dates_are_those_of_the_first_certificate_in_utc(begin, end):
    issued = trustme.CA().issue_cert(HOST, not_before=begin, not_after=end)
    pem = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    assert validity_of(b"words\n" + pem) == (begin.replace(tzinfo=UTC), end.replace(tzinfo=UTC))


def test_what_is_no_certificate_has_no_dates():
    pem = trustme.CA().cert_pem.bytes()
    for content in (b"", b"words", pem[: len(pem) // 2], pem.replace(b"\nMII", b"\nAAA")):
        with pytest.raises(ValueError, match="certificate"):
            validity_of(content)
    assert certificates_in(pem + b"\n# words\n" + pem) == 2 * certificates_in(pem.replace(b"\n", b"\r\n"))


@pytest.mark.asyncio
@pytest.mark.parametrize(("dates", "words"), [(EXPIRED, "has expired"), (FUTURE, "is not valid before")])
async def test_a_daemon_does_not_start_with_a_certificate_that_is_not_valid_now(
    authority, load_stub, dates, words
):
    chain, key = authority.issue("server", HOST, **dates)
    begin = datetime.now(UTC).replace(microsecond=0)
    with pytest.raises(ConfigError) as refusal:
        Daemon(ServeOptions(tls_cert=str(chain), tls_key=str(key)), load_stub)
    date = dates["not_after" if dates is EXPIRED else "not_before"]
    for part in (f"tls_cert {chain} {words}", f"{date:%Y-%m-%dT%H:%M:%SZ}"):
        assert part in str(refusal.value)
    told = re.search(r"by the clock of this machine it is (\S+Z):", str(refusal.value))[1]
    assert begin <= datetime.fromisoformat(told) <= datetime.now(UTC)


@pytest.mark.asyncio
@pytest.mark.parametrize("dates", [EXPIRED, FUTURE], ids=["expired", "not yet valid"])
async def test_a_reload_refuses_a_certificate_that_is_not_valid_now(
    start_tls, authority, collect, caplog, dates
):
    daemon = await start_tls(metrics_port=0)
    before = await scrape(daemon)
    authority.issue("server", HOST, **dates)
    await daemon.daemon.reload()
    assert "reload refused" in caplog.text
    async with Client(daemon.address, tls=tls_context(authority.file)) as client:
        assert await collect(client.generate([5], SHORT))
    assert (await scrape(daemon))[EXPIRY,] == before[EXPIRY,]


@pytest.mark.asyncio
async def test_metrics_have_the_end_of_the_certificate_in_use(start_tls, start_daemon, authority):
    daemon = await start_tls(metrics_port=0)
    chain, _ = authority.issue("server", HOST, not_after=NOW + 3 * DAY)
    await daemon.daemon.reload()
    assert (await scrape(daemon))[EXPIRY,] == validity_of(chain.read_bytes()).end.timestamp()
    assert abs((await scrape(daemon))[EXPIRY,] - (NOW + 3 * DAY).timestamp()) <= 1.0
    assert (EXPIRY,) not in await scrape(await start_daemon(metrics_port=0))


async def open_tls(address, context, raw_over):
    """A connection by hand that knows a goodbye from its frame; h2 would close."""
    host, port = address.split(":")
    connection = raw_over(*await asyncio.open_connection(host, int(port), ssl=context, server_hostname=HOST))
    connection.h2._frame_dispatch_table[GoAwayFrame] = lambda frame: ([], [frame])
    await connection.flush()
    return connection


async def begin_call(connection, framed, engine):
    """A call that does not end before the engine is released."""
    engine.hold()
    sampling = pb.SamplingParams(max_tokens=3)
    request = framed(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=sampling))
    stream_id = connection.request("/pykv.v1.Engine/Generate", request)
    await connection.flush()
    await engine.until(lambda: engine.live)
    return stream_id


async def check_departure(connection, running, engine):
    """The client is asked to leave: its call goes on, another is refused, and then the connection ends."""
    assert (await connection.wait_for(GoAwayFrame)).last_stream_id == LARGEST_STREAM_ID
    assert (await connection.wait_for(GoAwayFrame)).last_stream_id == running
    late = connection.request("/pykv.v1.Engine/GetModel", b"\0\0\0\0\0")
    await connection.flush()
    assert (await connection.wait_for(StreamReset, late)).error_code == 7  # REFUSED_STREAM
    engine.release()
    assert (await connection.status(running))[0] == 0
    async with asyncio.timeout(20):
        while await connection.reader.read(65536):
            pass
    await connection.close()


@pytest.fixture
def clients(make_authority, tmp_path):
    """Two authorities of clients, a certificate of each, and the file of those that are trusted."""

    class Clients:
        old, new = make_authority(tmp_path / "old"), make_authority(tmp_path / "new")
        file = tmp_path / "clients.pem"

        def trust(self, *authorities):
            self.file.write_bytes(b"".join(each.file.read_bytes() for each in authorities))

    clients = Clients()
    clients.trust(clients.old)
    return clients


@pytest.mark.asyncio
async def test_who_has_a_certificate_comes_back_once_an_authority_is_trusted_no_more(
    start_tls, authority, clients, raw_over, framed, collect
):
    daemon = await start_tls(tls_client_ca=str(clients.file), tls_client_auth="optional")
    with_old = tls_context(authority.file, *clients.old.issue("client", "client.test"))
    certified = await open_tls(daemon.address, with_old, raw_over)
    other = await open_tls(daemon.address, tls_context(authority.file), raw_over)
    running = await begin_call(certified, framed, daemon.engine)
    clients.trust(clients.new)
    await daemon.daemon.reload()
    await daemon.daemon.reload()  # nothing has changed
    await check_departure(certified, running, daemon.engine)
    async with Client(daemon.address, tls=with_old) as client:
        with pytest.raises(ServiceError):
            await client.get_model()
    with_new = tls_context(authority.file, *clients.new.issue("client", "client.test"))
    async with Client(daemon.address, tls=with_new) as client:
        assert await collect(client.generate([5], SHORT))
    call = other.request("/pykv.v1.Engine/GetModel", b"\0\0\0\0\0")  # it has shown no certificate
    await other.flush()
    assert (await other.status(call))[0] == 0
    await other.close()


@pytest.mark.asyncio
async def test_one_more_authority_sends_nobody_away(start_tls, authority, clients, raw_over, framed):
    daemon = await start_tls(tls_client_ca=str(clients.file))
    with_old = tls_context(authority.file, *clients.old.issue("client", "client.test"))
    connection = await open_tls(daemon.address, with_old, raw_over)
    clients.trust(clients.new, clients.old)
    await daemon.daemon.reload()
    call = connection.request("/pykv.v1.Engine/GetModel", b"\0\0\0\0\0")
    await connection.flush()
    assert (await connection.status(call))[0] == 0
    assert not [event for event in connection.events if isinstance(event, GoAwayFrame)]
    await connection.close()


@pytest.mark.asyncio
async def test_a_client_of_ours_goes_on_with_its_stream_and_calls_by_a_new_connection(
    start_tls, authority, clients, collect, eventually
):
    daemon = await start_tls(tls_client_ca=str(clients.file))
    context = tls_context(authority.file, *clients.old.issue("client", "client.test"))
    async with Client(daemon.address, tls=context) as client:
        stream = client.generate([5], LONG)
        await anext(stream)
        context.load_cert_chain(*clients.new.issue("client", "client.test"))
        clients.trust(clients.new)
        await daemon.daemon.reload()

        async def is_served_by_another_connection():
            await client.get_model()
            return daemon.daemon._server.num_connections == 2

        await eventually(is_served_by_another_connection)
        assert await anext(stream)
        await stream.aclose()


@pytest.mark.asyncio
async def test_a_connection_whose_handshake_began_before_the_change_is_asked_to_leave_too(
    start_tls, authority, clients, raw_over, framed, eventually
):
    daemon = await start_tls(tls_client_ca=str(clients.file))
    context = tls_context(authority.file, *clients.old.issue("client", "client.test"))
    reader, writer = await asyncio.open_connection(*daemon.address.split(":"))

    async def has_arrived():
        return daemon.daemon._server.num_connections == 1

    await eventually(has_arrived)
    clients.trust(clients.new)
    await daemon.daemon.reload()
    await writer.start_tls(context, server_hostname=HOST)
    connection = raw_over(reader, writer)
    connection.h2._frame_dispatch_table[GoAwayFrame] = lambda frame: ([], [frame])
    assert (await connection.wait_for(GoAwayFrame)).last_stream_id == LARGEST_STREAM_ID
    await connection.close()


@pytest.mark.asyncio
async def test_a_connection_ends_with_its_clients_certificate(
    start_tls, authority, clients, raw_over, framed, monkeypatch
):
    ends = (NOW + timedelta(hours=1)).replace(microsecond=0)
    monkeypatch.setattr(departure, "time", lambda: ends.timestamp() - 0.05)
    daemon = await start_tls(tls_client_ca=str(clients.file))
    certificate = clients.old.issue("client", "client.test", not_after=ends)
    connection = await open_tls(daemon.address, tls_context(authority.file, *certificate), raw_over)
    running = await begin_call(connection, framed, daemon.engine)
    assert not [event for event in connection.events if isinstance(event, GoAwayFrame)]
    monkeypatch.setattr(departure, "time", lambda: ends.timestamp() + 0.05)
    await check_departure(connection, running, daemon.engine)


@pytest.mark.asyncio
async def test_a_certificate_that_has_ended_since_its_session_began_serves_no_call(
    start_tls, authority, clients, raw_over, monkeypatch, eventually
):
    """TLS does not look at a certificate again where a session is resumed."""
    daemon = await start_tls(tls_client_ca=str(clients.file))
    context = tls_context(authority.file, *clients.old.issue("client", "client.test", not_after=NOW + DAY))
    monkeypatch.setattr(departure, "time", lambda: (NOW + 2 * DAY).timestamp())
    connection = await open_tls(daemon.address, context, raw_over)
    assert (await connection.wait_for(GoAwayFrame)).last_stream_id == 0

    async def has_left():
        return daemon.daemon._server.num_connections == 0

    await eventually(has_left)
    await connection.close()


def shaking_hands(**options):
    """A client that fails: it waits for what the daemon says of that."""

    def connect(address, authority):
        host, port = address.split(":")
        context = tls_context(options.get("authority", authority).file, *options.get("certificate", ()))
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                with context.wrap_socket(connection, server_hostname=HOST) as inner:
                    inner.recv(1)
            except OSError:
                return

    return connect


def sending(data, *, leaves=False, resets=False):
    """A client that sends bytes."""

    def connect(address, _):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(data)
            if resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            while not (leaves or resets) and connection.recv(100):
                pass

    return connect


async def failed_handshakes(daemon):
    """How many have failed, by their cause."""
    samples = await scrape(daemon)
    return {key[1]: count for key, count in samples.items() if key[0] == "pykv:tls_handshakes_failed_total"}


@pytest.mark.asyncio
async def test_handshakes_that_fail_are_counted_by_their_cause_and_told(
    start_tls, authority, make_authority, clients, tmp_path, eventually, caplog
):
    caplog.set_level(logging.INFO)
    stranger = make_authority(tmp_path / "stranger")
    good = clients.old.issue("good", "client.test")
    failing = {
        "expired_certificate": shaking_hands(certificate=clients.old.issue("a", "client.test", **EXPIRED)),
        "certificate_not_yet_valid": shaking_hands(
            certificate=clients.old.issue("b", "client.test", **FUTURE)
        ),
        "untrusted_certificate": shaking_hands(certificate=stranger.issue("c", "client.test")),
        "no_certificate": shaking_hands(),
        "refused_by_client": shaking_hands(certificate=good, authority=stranger),
        "not_tls": sending(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    }
    daemon = await start_tls(tls_client_ca=str(clients.file), metrics_port=0)
    for connect in failing.values():
        await asyncio.to_thread(connect, daemon.address, authority)
    for left in (sending(b"", leaves=True), sending(b"\x16", leaves=True), sending(b"\x16", resets=True)):
        await asyncio.to_thread(left, daemon.address, authority)

    async def counted():
        return sum(daemon.daemon._server.num_failed_handshakes.values()) == 9

    await eventually(counted)
    found = await failed_handshakes(daemon)
    assert set(found) == {failure.label for failure in HandshakeFailure}
    assert {cause: count for cause, count in found.items() if count} == dict.fromkeys(failing, 1) | {
        "left": 3
    }
    told = [record for record in caplog.records if record.getMessage() == "TLS handshake failed"]
    assert [record.cause for record in told] == list(failing)
    assert {record.peer for record in told} == {HOST}
    assert "certificate has expired" in told[0].error
    assert daemon.daemon._server.num_connections == 0


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_of_pykv_that_trusts_another_authority_is_counted_as_one_that_refused(
    start_daemon_in, make_engine, authority, make_authority, tmp_path, eventually, make_loop
):
    stranger = make_authority(tmp_path / "stranger")
    chain, key = authority.issue("server", HOST)

    async def refuse():
        daemon, stop = await start_daemon_in(make_engine(), tls_cert=str(chain), tls_key=str(key))
        async with Client(daemon.address, tls=tls_context(stranger.file)) as client:
            with pytest.raises(ServiceError, match="certificate verify failed"):
                await client.get_model()
        failed = daemon.daemon._server.num_failed_handshakes

        async def is_counted():
            return any(failed.values())

        await eventually(is_counted)
        assert {cause: count for cause, count in failed.items() if count} == {
            HandshakeFailure.REFUSED_BY_CLIENT: 1
        }
        await stop()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(refuse())


@pytest.mark.asyncio
async def test_a_handshake_that_does_not_end_in_time_is_counted_and_told(start_tls, authority, caplog):
    caplog.set_level(logging.INFO)
    daemon = await start_tls(request_timeout=0.5, metrics_port=0)
    await asyncio.to_thread(sending(b"\x16\x03\x01"), daemon.address, authority)
    found = await failed_handshakes(daemon)
    assert {cause: count for cause, count in found.items() if count} == {"timed_out": 1}
    told = [record for record in caplog.records if record.getMessage() == "TLS handshake failed"]
    assert [(record.cause, record.peer) for record in told] == [("timed_out", HOST)]
    assert daemon.daemon._server.num_connections == 0


@pytest.mark.asyncio
async def test_a_flood_of_handshakes_that_fail_fills_no_log(start_tls, eventually, caplog):
    caplog.set_level(logging.INFO)
    daemon = await start_tls()
    for _ in range(100):
        reader, writer = await asyncio.open_connection(*daemon.address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
    await daemon.stop()
    told = [record for record in caplog.records if record.getMessage() == "TLS handshake failed"]
    assert sum(getattr(record, "repeated", 1) for record in told) == 100
    assert len(told) < 20


def test_files_that_change_while_they_are_read_are_refused(authority, clients, monkeypatch):
    chain, key = authority.issue("server", HOST)
    for file, name in ((chain, "tls_cert"), (clients.file, "tls_client_ca")):
        contents = iter([file.read_bytes(), b""])
        read = {file: lambda contents=contents: next(contents)}
        monkeypatch.setattr(
            "pykv.service.tls.read_bytes",
            lambda path, _, read=read: read.get(path, path.read_bytes)(),
        )
        with pytest.raises(ConfigError, match=f"{name} .* changed while it was read"):
            TlsFiles(chain, key, clients.file).read()
