"""KV events over ZeroMQ, decoded by the types that vLLM documents: the same set as the core's in the end."""

import asyncio
import urllib.request
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from pykv.client import Client
from pykv.errors import ConfigError
from pykv.service.kv_events.feed import EventFeed
from pykv.service.kv_events.zmq_publisher import ZmqPublisher
from pykv.service.options import ServeOptions

pytestmark = pytest.mark.asyncio


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ZmqKnown:
    def __init__(self):
        self.hashes, self.numbers = set(), []

    def apply(self, number, payload):
        self.numbers.append(int.from_bytes(number, "big"))
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.hashes |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.hashes -= set(event.block_hashes)
            else:
                self.hashes.clear()


@pytest.fixture
def cached_hashes(cached_keys):
    """The numbers by which vLLM knows what can be found: `cached_hashes(engine)`."""
    return lambda engine: {int.from_bytes(key[:8], "big") for key in cached_keys(engine)}


@asynccontextmanager
async def zmq_sockets(daemon, **options):
    context = zmq.asyncio.Context()
    subscribing, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    publishing, replaying = daemon.daemon.zmq_addresses
    for name, value in options.items():
        subscribing.set(getattr(zmq, name), value)
    subscribing.connect(publishing)
    subscribing.subscribe(b"")
    if replaying:
        asking.connect(replaying)
    try:
        yield subscribing, asking
    finally:
        context.destroy(linger=0)


LOOPBACK = {"kv_events_zmq": "tcp://127.0.0.1:*", "kv_events_zmq_replay": "tcp://127.0.0.1:*"}


async def replay(asking, known, number):
    """As vLLM's subscribers ask for what they missed."""
    await asking.send_multipart((b"", number.to_bytes(8, "big")))
    while (frames := await asking.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
        known.apply(*frames[1:])


async def test_a_zmq_subscriber_follows_random_load_to_the_cores_own_set(
    start, eventually, load, cached_hashes
):
    daemon, known = await start(**LOOPBACK), ZmqKnown()
    async with zmq_sockets(daemon) as (subscribing, _), Client(daemon.address) as client:

        async def follow():
            while True:
                topic, number, payload = await subscribing.recv_multipart()
                assert topic == b""
                known.apply(number, payload)

        task = asyncio.create_task(follow())

        async def is_connected():
            await load(client, 4, seed=5)
            return bool(known.numbers)

        async def agrees():
            return known.hashes == cached_hashes(daemon.engine)

        await eventually(is_connected)
        daemon.engine.engine.steps.reset_prefix_cache()
        await load(client, 60)
        await eventually(agrees)
        task.cancel()
    assert known.numbers == list(range(known.numbers[0], known.numbers[0] + len(known.numbers)))


async def test_a_zmq_subscriber_that_missed_batches_is_mended_by_a_replay(start, load, cached_hashes):
    daemon, known = await start(**LOOPBACK), ZmqKnown()
    async with Client(daemon.address) as client:
        await load(client, 40)
        async with zmq_sockets(daemon) as (_, asking):
            await replay(asking, known, 0)
    assert known.hashes == cached_hashes(daemon.engine)
    assert len(known.hashes) > 10


async def test_messages_that_ask_for_no_replay_are_counted_and_logged_now_and_then(start, eventually, caplog):
    daemon, known = await start(metrics_port=0, **LOOPBACK), ZmqKnown()
    async with zmq_sockets(daemon) as (_, asking):
        for place in range(300):
            await asking.send_multipart([b""] * (place % 3 + 1))
        await replay(asking, known, 0)  # still served

    def scrape():
        with urllib.request.urlopen(f"http://{daemon.daemon.metrics_address}/metrics") as answer:
            return answer.read().decode()

    assert "pykv:kv_event_replays_refused_total 300.0" in await asyncio.to_thread(scrape)
    assert [record.getMessage() for record in caplog.records].count("KV event replay request refused") == 1


async def test_a_zmq_subscriber_that_does_not_read_holds_nobody_up(start, load):
    daemon = await start(**LOOPBACK)
    async with zmq_sockets(daemon, RCVHWM=1, RCVBUF=4096), Client(daemon.address) as client:
        async with asyncio.timeout(60):
            await load(client, 60)
        assert daemon.engine.stats().num_live_requests == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_events_zmq": "tcp://0.0.0.0:5557"}, "kv_events_zmq is .*--insecure-bind"),
        ({"kv_events_zmq": "tcp://*:5557"}, "kv_events_zmq is .*--insecure-bind"),
        ({"kv_events_zmq_replay": "tcp://127.0.0.1:5557"}, "without kv_events_zmq"),
    ],
)
async def test_addresses_that_others_could_read_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ServeOptions(**options)
    assert ServeOptions(kv_events_zmq="ipc:///tmp/x").max_kv_events == 2**16


async def test_an_address_that_is_taken_is_refused_by_its_option(start, start_daemon):
    daemon = await start(kv_events_zmq="tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=f"kv_events_zmq cannot listen on {daemon.daemon.zmq_addresses[0]}"):
        ZmqPublisher(EventFeed(True), daemon.daemon.zmq_addresses[0], None, 16)
