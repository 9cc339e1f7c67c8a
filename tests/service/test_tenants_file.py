"""Whatever the file of tenants holds: it is refused by name, and the daemon that has another goes on."""

import asyncio
import hashlib
import os
import signal
import threading

import pytest

from pykv.client import Client
from pykv.errors import ConfigError
from pykv.sampling import SamplingParams
from pykv.service import reload as reload_module
from pykv.service.access import read_tenants

LONG = SamplingParams(max_tokens=100_000)


def file_of(token):
    return f'[tenants.acme]\ntoken_sha256 = ["{hashlib.sha256(token.encode()).hexdigest()}"]\n'


@pytest.fixture
def tenants_file(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(file_of("acme-secret"))
    return path


@pytest.fixture
def start_for_tenant(start_daemon, tenants_file):
    return lambda: start_daemon(tenants=str(tenants_file))


def as_acme(daemon):
    return Client(daemon.address, token="acme-secret")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no table"]),
        ("tenants = 3", ["no table"]),
        ("[tenants.a]", ["tenant a", "no credential"]),
        ("[tenants.a]\ntoken = 'x'", ["token of tenant a", "token_sha256"]),
        ("[tenants.a]\ntoken_sha256 = ['plain-secret']", ["token_sha256[0]", "64 digits"]),
        ("[tenants.a]\ntoken_sha256 = 'x'", ["token_sha256 of tenant a"]),
        ("[tenants.a]\ncertificates = ['c']\nmax_in_flight = 0", ["max_in_flight", "0", "from 1 to"]),
        ("[tenants.a]\ncertificates = ['c']\nmax_in_flight = true", ["max_in_flight", "True"]),
        ("[tenants.a]\ncertificates = ['c']\ntokens_per_second = -1", ["tokens_per_second", "-1"]),
        ("[tenants.a]\ncertificates = ['c']\ntokens_per_second = nan", ["tokens_per_second", "nan"]),
        ("[tenants.a]\ncertificates = ['c']\nscope = 7", ["scope", "7"]),
        ("[tenants.a]\ncertificates = ['c']\noperator = 1", ["operator", "1"]),
        ("[tenants.a]\ncertificates = ['c']\n[tenants.b]\ncertificates = ['c']", ["a and b", "certificates"]),
        ("[tenants.'a/b']\ncertificates = ['c']", ["a/b", "letters"]),
        ("[tenant.a]", ["tenant", "[tenants.NAME]"]),
        ("[tenants", ["no TOML"]),
        ("[tenants]\na = 1", ["tenant a is no table"]),
    ],
)
def test_a_bad_file_is_refused_by_tenant_and_key(tmp_path, text, words):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_tenants(path)
    assert all(word in str(refusal.value) for word in words)
    assert "plain-secret" not in str(refusal.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        read_tenants(tmp_path / "nowhere.toml")


def refusal_in(caplog):
    """What the log says of the reload that was refused."""
    return next(record.error for record in caplog.records if record.getMessage() == "reload refused")


HOSTILE = {
    "digits": "max_in_flight = " + "1" * 5000,
    "hex": "max_in_flight = 0x" + "1" * 5000,
    "brackets": "x = " + "[" * 100_000,
    "tables": "max_in_flight" + ".a" * 5_000 + " = 1",
    "key": "k" * 100_000 + " = 1",
    "text": "max_in_flight = '" + "x" * 100_000 + "'",
    "size": "#" * 2**20 + " a remark",
    "bytes": "\0\ud800",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", HOSTILE)
async def test_whatever_a_file_holds_a_hangup_changes_nothing_and_ends_nothing(
    start_for_tenant, tenants_file, eventually, caplog, kind
):
    daemon = await start_for_tenant()
    async with as_acme(daemon) as client:
        stream = client.generate([5], LONG)
        await anext(stream)
        text = file_of("new") + HOSTILE[kind]
        tenants_file.write_bytes(text.encode(errors="surrogatepass"))
        os.kill(os.getpid(), signal.SIGHUP)

        async def is_refused():
            return "reload refused" in caplog.text

        await eventually(is_refused)
        assert not daemon.task.done()
        assert "Traceback" not in caplog.text  # foreseen, not merely caught
        assert len(refusal_in(caplog)) < 500
        await client.get_model()
        assert await anext(stream)
        await stream.aclose()


@pytest.mark.asyncio
async def test_a_pipe_in_place_of_the_file_is_refused_and_holds_nobody_up(
    start_for_tenant, tenants_file, caplog
):
    daemon = await start_for_tenant()
    tenants_file.unlink()
    os.mkfifo(tenants_file)
    await daemon.daemon.reload()
    assert "is no regular file" in refusal_in(caplog)
    async with as_acme(daemon) as client:
        await client.get_model()


@pytest.mark.asyncio
async def test_while_a_mount_hangs_calls_go_on_and_the_reload_is_given_up(
    start_for_tenant, monkeypatch, caplog
):
    daemon = await start_for_tenant()
    hung = threading.Event()
    monkeypatch.setattr(reload_module, "read_tenants", lambda path: hung.wait() and ())
    monkeypatch.setattr(reload_module, "READ_SECONDS", 0.2)
    reloading = asyncio.create_task(daemon.daemon.reload())
    async with as_acme(daemon) as client:
        await client.get_model()
        await reloading
        assert "could not be read within" in refusal_in(caplog)
        hung.set()
        await client.get_model()


@pytest.mark.asyncio
async def test_an_error_that_nobody_foresaw_ends_no_daemon(start_for_tenant, monkeypatch, eventually, caplog):
    daemon = await start_for_tenant()
    monkeypatch.setattr(reload_module, "read_tenants", lambda path: 1 // 0)
    os.kill(os.getpid(), signal.SIGHUP)

    async def is_refused():
        return "reload refused" in caplog.text

    await eventually(is_refused)
    async with as_acme(daemon) as client:
        await client.get_model()
