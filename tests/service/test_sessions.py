"""Sessions over the wire: they hit, they end, and they are one tenant's."""

import asyncio
import hashlib
import io

import pytest

from pykv.cli.chat import Conversation
from pykv.cli.main import main
from pykv.client import Client
from pykv.errors import ConfigError, InvalidRequestError
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.service.access import CacheShares, Tenant, read_tenants
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture
def two_tenants(tmp_path):
    path = tmp_path / "tenants.toml"
    names = {"acme": "cache_share = 0.25", "bolt": ""}
    path.write_text(
        "".join(
            f'[tenants.{name}]\ntoken_sha256 = ["{digest(name)}"]\n{more}\n' for name, more in names.items()
        )
    )
    return path


class Shown:
    def __init__(self):
        self.notes = []

    def show(self, text):
        pass

    def note(self, text):
        self.notes.append(text)


async def test_what_a_request_says_of_its_blocks_reaches_the_engine(client, engine, collect):
    retention = Retention(session_id="sitzung ü", ttl_seconds=60.0, next_turn_seconds=0.0, priority=-2)
    await collect(client.generate([5], SHORT, request_id="a", retention=retention))
    messages = [{"role": "user", "content": "four"}]
    await collect(client.chat(messages, SHORT, request_id="b", retention=Retention(session_id=b"x")))
    await collect(client.generate([5], SHORT, request_id="c"))
    assert engine.retentions == {"a": retention, "b": Retention(session_id="x"), "c": Retention()}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.Retention(session_id="é" * 129), "session_id"),
        (pb.Retention(ttl_seconds=-1), "ttl_seconds"),
        (pb.Retention(ttl_seconds=float("nan")), "ttl_seconds"),
        (pb.Retention(session_id="s", next_turn_seconds=3601), "next_turn_seconds"),
        (pb.Retention(session_id="s", next_turn_seconds=float("nan")), "next_turn_seconds"),
        (pb.Retention(next_turn_seconds=1), "next_turn_seconds"),
        (pb.Retention(priority=3), "priority"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_field(raw, framed, message, field):
    request = pb.GenerateRequest(text="a", retention=message)
    stream_id = await raw.send("/pykv.v1.Engine/Generate", framed(request.SerializeToString()))
    code, text = await raw.status(stream_id)
    assert (code, field in text) == (3, True)


async def test_a_session_without_a_name_cannot_be_ended(client):
    for name in ("", "x" * 257):
        with pytest.raises(InvalidRequestError, match="session_id"):
            await client.end_session(name)
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        client.generate([5], retention=Retention(session_id=b"\xff"))


async def test_a_tenants_sessions_are_never_anothers(start_daemon, make_real_engine, two_tenants, collect):
    daemon = await start_daemon(make_real_engine(), tenants=str(two_tenants))
    retention = Retention(session_id="s")
    async with Client(daemon.address, token="acme") as acme, Client(daemon.address, token="bolt") as bolt:
        await collect(acme.generate("a" * 64, SHORT, retention=retention))
        assert not await bolt.end_session("s")
        deltas = await collect(bolt.generate("a" * 64, SHORT, retention=retention))
        assert deltas[-1].usage.cached_tokens == 0
        assert await bolt.end_session("s")
        assert not await bolt.end_session("s")
        assert await acme.end_session("s")


async def test_a_turn_of_a_session_hits_what_pressure_would_have_evicted(
    start_daemon, make_small_engine, collect
):
    daemon = await start_daemon(make_small_engine(num_blocks=41, watermark=0.0))
    retention = Retention(session_id="s", next_turn_seconds=600.0)
    async with Client(daemon.address) as client:

        async def cached(text, **options):
            return (await collect(client.generate(text, SHORT, **options)))[-1].usage.cached_tokens

        await cached("kept " * 30, retention=retention)
        await cached("lost " * 30)
        for number in range(8):
            await cached(f"{number} some other text " * 15)
        assert await cached("lost " * 30) == 0
        assert await cached("kept " * 30, retention=retention) >= 144


async def test_a_conversation_is_a_session_that_ends_with_it(real, collect):
    async with Client(real.address) as client:
        conversation, sessions = Conversation(client, SHORT, "be brief " * 4), []
        await conversation.ask("what is it?", Shown())
        last = await conversation.ask("and then?", Shown())
        assert last.usage.cached_tokens >= 48
        sessions.append(conversation.session_id)
        await conversation.restart()
        assert conversation.session_id != sessions[0]
        assert not await client.end_session(sessions[0])


async def test_the_command_ends_its_session_and_shows_what_was_cached(real, monkeypatch, capsys):
    end_session, ended = real.engine.end_session, []

    def end(session_id, *, tenant):
        ended.append((session_id, end_session(session_id, tenant=tenant)))
        return ended[-1][1]

    monkeypatch.setattr(real.engine, "end_session", end)
    questions = ("what is it that you say to this?", "and then?", "/new", "something else altogether")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(questions)))
    arguments = ["chat", "--address", real.address, "--max-tokens", "2"]
    assert await asyncio.get_running_loop().run_in_executor(None, main, arguments) == 0
    out = capsys.readouterr().out
    assert "; 0 of " in out
    assert "; 32 of " in out
    assert "keeps the conversation" not in out
    assert [was_live for _, was_live in ended] == [True, True]
    assert ended[0] != ended[1]


async def test_shares_of_the_cache_follow_the_file_of_tenants(start_daemon, two_tenants):
    daemon = await start_daemon(tenants=str(two_tenants), tenant_cache_share=0.5)
    assert daemon.engine.shares == {b"acme": 0.25, b"bolt": 0.5}
    two_tenants.write_text(f'[tenants.acme]\ntoken_sha256 = ["{digest("acme")}"]\ncache_share = 1')
    await daemon.daemon.reload()
    assert daemon.engine.shares == {b"acme": 1, b"bolt": 0.0}
    two_tenants.write_text(f'[tenants.acme]\ntoken_sha256 = ["{digest("acme")}"]\ncache_share = 2')
    await daemon.daemon.reload()
    assert daemon.engine.shares == {b"acme": 1, b"bolt": 0.0}, "a file changed for the worse changes nothing"


async def test_a_share_makes_room_where_the_cache_is_shared(
    start_daemon, make_small_engine, two_tenants, collect
):
    daemon = await start_daemon(make_small_engine(num_blocks=41, watermark=0.0), tenants=str(two_tenants))
    async with Client(daemon.address, token="acme") as acme, Client(daemon.address, token="bolt") as bolt:

        async def cached(client, text):
            return (await collect(client.generate(text, SHORT)))[-1].usage.cached_tokens

        await cached(bolt, "old " * 30)
        for number in range(5):
            await cached(acme, f"{number} some other text " * 15)
        assert await cached(bolt, "old " * 30) == 112, "acme is above a quarter: its own blocks went"


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan", "true", "'x'"])
async def test_a_bad_share_is_refused_by_name(tmp_path, value):
    path = tmp_path / "tenants.toml"
    path.write_text(f"[tenants.a]\ncertificates = ['c']\ncache_share = {value}")
    with pytest.raises(ConfigError, match=r"cache_share of tenant a is .*: allowed is a number from 0 to 1"):
        read_tenants(path)


async def test_shares_are_told_once_there_is_a_cache():
    told = {}
    shares = CacheShares([Tenant(name="a", certificates=("c",), cache_share=0.5)], default=1.0)
    shares.change([Tenant(name="b", certificates=("c",))])
    assert told == {}
    shares.serve(told.__setitem__)
    assert told == {b"b": 1.0}
