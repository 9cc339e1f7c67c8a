"""The client: its addresses, what it needs, and what it raises."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykv.client import Client, ServiceError
from pykv.errors import ConfigError, InvalidRequestError
from pykv.sampling import SamplingParams
from pykv.service.client import channel
from pykv.service.transport import TransportLimits

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:port", "host:65536", "host:-1", "host:²"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Client(address)


def test_an_address_may_be_of_ipv6():
    client = Client("[::1]:50051")
    assert (client._host, client._port) == ("::1", 50051)


def test_the_client_needs_none_of_the_daemons_dependencies():
    heavy = ("torch", "transformers", "structlog", "uvloop")
    check = f"import sys, pykv.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.asyncio
async def test_without_a_server_calls_say_so():
    async with Client("127.0.0.1:1") as client:
        for call in (client.health(), client.get_model(), anext(client.generate("a"))):
            with pytest.raises(ServiceError, match=r"no server answers at 127\.0\.0\.1:1") as failure:
                await call
            assert failure.value.status == "UNAVAILABLE"


@pytest.mark.asyncio
async def test_a_prompt_that_is_no_list_of_integers_is_refused_at_once():
    async with Client() as client:
        for prompt in (["a"], [1.5], [2**70], [None]):
            with pytest.raises(InvalidRequestError, match="prompt"):
                client.generate(prompt)


@pytest.mark.asyncio
async def test_of_many_calls_few_ends_are_remembered_and_calls_that_are_left_do_no_harm(
    client, engine, monkeypatch
):
    monkeypatch.setattr(channel, "MAX_CLOSED_STREAMS", 20)
    for _ in range(60):
        await client.health()
    protocol = client._channel._protocol
    assert len(protocol.connection._connection._closed_streams) <= 20
    for _ in range(30):  # each is left while more is on its way
        stream = client.generate([5], SamplingParams(max_tokens=1000))
        await anext(stream)
        await stream.aclose()
    assert await client.health() == "SERVING"
    assert client._channel._protocol is protocol


@pytest.mark.asyncio
async def test_what_still_comes_for_a_call_that_was_left_is_not_answered(start_daemon, eventually):
    """The daemon would take thousands of resets for a flood, and close the connection."""
    daemon = await start_daemon(control_frames_burst=10, control_frames_per_second=1.0)
    async with Client(daemon.address) as client:
        stream = client.generate([5], SamplingParams(max_tokens=100_000))
        await anext(stream)
        protocol = client._channel._protocol
        protocol.connection._transport.pause_reading()
        (connection,) = daemon.daemon._server._connections
        (call,) = connection.connection.h2.streams.values()

        async def is_full():
            return call.outbound_flow_control_window < 1000

        await eventually(is_full)
        await stream.aclose()
        protocol.connection._transport.resume_reading()
        assert await client.health() == "SERVING"
        assert client._channel._protocol is protocol


def test_the_ends_of_all_calls_that_may_run_at_once_are_remembered():
    assert TransportLimits().max_streams < channel.MAX_CLOSED_STREAMS


@pytest.mark.asyncio
async def test_a_closed_client_connects_again_when_it_is_used(client):
    await client.health()
    await client.aclose()
    assert await client.health() == "SERVING"
