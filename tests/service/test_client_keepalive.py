"""A server that vanishes without a word is found by a PING, and its calls end."""

import asyncio

import pytest
from h2.errors import ErrorCodes

from pykv import client as client_module
from pykv.client import LEAST_KEEPALIVE_SECONDS, Client, ServiceError
from pykv.errors import ConfigError
from pykv.service.transport import TransportLimits
from pykv.service.transport.goaway import goaway

SILENCE = r"UNAVAILABLE: the server sent nothing for 0\.1 s and did not answer a ping within 0\.1 s"
QUICK = {"keepalive_seconds": 0.1, "keepalive_timeout_seconds": 0.1}
GENERATE, MODEL = "/pykv.v1.Engine/Generate", "/pykv.v1.Engine/GetModel"


@pytest.fixture
def quick(monkeypatch):
    """Lets clients ask as soon as QUICK has it."""
    monkeypatch.setattr(client_module, "LEAST_KEEPALIVE_SECONDS", 0.0)


@pytest.fixture
def busy(scripted):
    """A server that answers no call unless a test has it do so."""

    def say_nothing(connection, stream_id):
        pass

    return scripted({GENERATE: say_nothing, MODEL: say_nothing})


@pytest.mark.asyncio
async def test_all_calls_of_a_server_that_vanished_end_and_the_next_makes_a_new_connection(quick, busy):
    busy.is_silent = True
    async with busy.running() as address, Client(address, **QUICK) as client, asyncio.timeout(20):
        calls = [
            asyncio.ensure_future(anext(client.generate("a"))),
            asyncio.ensure_future(client.get_model()),
        ]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            with pytest.raises(ServiceError, match=SILENCE):
                raise ended
        assert (busy.num_connections, busy.num_pings) == (1, 1)
        busy.is_silent = False
        busy.answers.clear()
        assert (await client.get_model()).name == ""
        assert busy.num_connections == 2


@pytest.mark.asyncio
async def test_a_server_that_answers_is_waited_for_and_one_without_calls_is_not_asked(quick, busy):
    async with busy.running() as address, Client(address, **QUICK) as client, asyncio.timeout(20):
        call = asyncio.ensure_future(client.get_model())
        await busy.until(lambda: busy.num_pings >= 4)
        busy.answer(MODEL)
        await call
        keepalive = client._channel._protocol._keepalive
        before = busy.num_pings
        keepalive.stop()
        keepalive._last_heard -= 1000.0  # a long silence
        keepalive._ask()
        assert keepalive._was_heard, "it was not asked"
        call = asyncio.ensure_future(client.get_model())
        await busy.until(lambda: busy.num_pings >= before + 2)
        busy.answer(MODEL)
        await call
        assert busy.num_connections == 1


@pytest.mark.asyncio
async def test_a_closed_client_asks_nobody(quick, busy):
    async with busy.running() as address:
        client = Client(address, **QUICK)
        call = asyncio.ensure_future(client.get_model())
        await busy.until(lambda: MODEL in busy.calls)
        protocol = client._channel._protocol
        await client.aclose()
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            await call
        assert protocol._keepalive is None


@pytest.mark.asyncio
@pytest.mark.parametrize("said", ["too_many_pings", "something else"])
async def test_a_goodbye_because_of_pings_says_so(busy, said):
    async with busy.running() as address, Client(address) as client, asyncio.timeout(20):
        call = asyncio.ensure_future(client.get_model())
        await busy.until(lambda: MODEL in busy.calls)
        busy.say(MODEL, lambda _, stream_id: goaway(stream_id, ErrorCodes.ENHANCE_YOUR_CALM, said))
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: ") as raised:
            await call
        assert ("keepalive_seconds" in str(raised.value)) == (said == "too_many_pings")
        busy.answers.clear()
        await client.get_model()
        assert busy.num_connections == 2


@pytest.mark.asyncio
async def test_who_asks_the_daemon_too_often_is_told(start_daemon, quick):
    daemon = await start_daemon(min_recv_ping_interval_without_data=60.0, max_ping_strikes=2)
    daemon.engine.hold()
    client = Client(daemon.address, keepalive_seconds=0.01, keepalive_timeout_seconds=0.01)
    async with client, asyncio.timeout(20):
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: the server closed .* too_many_pings"):
            await anext(client.generate("a"))


@pytest.mark.parametrize("seconds", [1, 4.999])
def test_a_client_that_would_be_sent_away_for_asking_is_refused(seconds):
    why = r"a finite number of at least 5, since the server closes a connection that asks more often"
    with pytest.raises(ConfigError, match=f"^keepalive_seconds is {seconds}: allowed is {why}"):
        Client(keepalive_seconds=seconds)
    assert Client(keepalive_seconds=5)._keepalive_seconds == 5.0


def test_the_daemon_lets_the_client_ask_as_often_as_it_does():
    assert Client()._keepalive_seconds > TransportLimits().min_ping_interval_seconds
    assert TransportLimits().min_ping_interval_seconds == LEAST_KEEPALIVE_SECONDS
    assert Client(keepalive_seconds=None)._keepalive_seconds is None


@pytest.mark.parametrize("name", ["keepalive_seconds", "keepalive_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "30"])
def test_a_number_of_seconds_that_is_none_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        Client(**{name: value})
