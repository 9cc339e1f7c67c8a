"""KV events over real sockets: order, gaps, snapshots, slow subscribers, and the same set as the core's in the end."""

import asyncio
import hashlib
import itertools
import random
import urllib.request
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from grpclib.exceptions import GRPCError
from h2.exceptions import StreamClosedError
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from pykv.client import Client, ServiceError
from pykv.errors import ConfigError
from pykv.events import KvEventKind, KvEvents, content_keys
from pykv.sampling import SamplingParams
from pykv.service.client.channel import PatientChannel
from pykv.service.kv_events import feed as feed_module
from pykv.service.kv_events.feed import EventFeed
from pykv.service.kv_events.messages import EVENTS_A_MESSAGE
from pykv.service.kv_events.zmq_publisher import ZmqPublisher
from pykv.service.options import ServeOptions
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.servable import cardinality_of, path_of

pytestmark = pytest.mark.asyncio
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
BLOCK = 16


class Known:
    """What a subscriber of pykv.v1 knows."""

    def __init__(self):
        self.keys, self.last, self.num_snapshots, self.num_gaps = set(), None, 0, 0

    def apply(self, batch):
        if batch.HasField("snapshot"):
            if batch.snapshot.index == 0:
                self.keys.clear()
                self.num_snapshots += 1
        elif batch.sequence_number != self.last + 1:
            self.num_gaps += 1
        self.last = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                self.keys.add(event.stored.key)
            elif kind == "removed_key":
                self.keys.discard(event.removed_key)
            else:
                self.keys.clear()


@asynccontextmanager
async def following(stream, known):
    """Applies a stream's batches in the background."""

    async def follow():
        async for batch in stream:
            known.apply(batch)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def cached_keys(engine):
    """What the core itself says can be found."""
    return {key.tobytes() for key in engine.snapshot_events().keys}


@pytest.fixture
def start(start_daemon, make_small_engine):
    async def start(num_blocks=41, max_kv_events=10_000, **options):
        engine = make_small_engine(num_blocks=num_blocks, max_kv_events=max_kv_events, watermark=0.0)
        return await start_daemon(engine, max_kv_events=max_kv_events, **options)

    return start


async def load(client, count, seed=1):
    """Random prompts, some of which begin alike, some at the same time."""
    choices = random.Random(seed)

    async def one():
        text = chr(97 + choices.randrange(4)) * 32 + str(choices.randrange(8)) * choices.randrange(1, 200)
        return [delta async for delta in client.generate(text, ONE)]

    for _ in range(count // 4):
        await asyncio.gather(*(one() for _ in range(4)))


async def test_a_subscriber_follows_random_load_to_the_cores_own_set(start, eventually):
    daemon, known = await start(), Known()
    async with Client(daemon.address) as client:
        await load(client, 12)
        async with following(client.kv_events(), known):

            async def agrees():
                return known.last is not None and known.keys == cached_keys(daemon.engine)

            await eventually(agrees)
            await load(client, 60, seed=2)
            await eventually(agrees)
            daemon.engine.engine.steps.reset_prefix_cache()
            await load(client, 4, seed=3)
            await eventually(agrees)
    assert daemon.engine.stats().evictions > 50
    assert (known.num_snapshots, known.num_gaps) == (1, 0)


async def test_events_come_in_order_with_keys_that_anybody_can_compute(start):
    daemon = await start()
    async with Client(daemon.address) as client:
        batches = client.kv_events()
        first = await anext(batches)
        assert (first.snapshot.index, first.snapshot.count, len(first.events)) == (0, 1, 0)
        tokens = list(range(10, 10 + 3 * BLOCK + 1))
        assert [delta async for delta in client.generate(tokens, ONE)]
        second = await anext(batches)
        assert second.sequence_number == first.sequence_number + 1
        keys = [key.tobytes() for key in content_keys(tokens, block_size=BLOCK)]
        stored = [event.stored for event in second.events]
        assert [(each.parent_key, each.key) for each in stored] == list(itertools.pairwise(keys))
        assert [each.is_first for each in stored] == [True, False, False]
        assert [token for each in stored for token in each.token_ids] == tokens[:-1]
        await batches.aclose()


async def test_who_comes_back_in_time_needs_no_snapshot_and_who_does_not_gets_one(start):
    daemon = await start()
    async with Client(daemon.address) as client:
        stays = client.kv_events()
        last = (await anext(stays)).sequence_number
        again = client.kv_events(last + 1)
        waiting = asyncio.create_task(anext(again))
        late = client.kv_events(last)
        assert (await anext(late)).HasField("snapshot")
        assert [delta async for delta in client.generate("a" * 40, ONE)]
        assert not (await waiting).HasField("snapshot")
        for each in (stays, again, late):
            await each.aclose()
        after = client.kv_events(last + 2)
        assert (await anext(after)).HasField("snapshot"), "nobody listened meanwhile"
        await after.aclose()


async def test_a_large_snapshot_comes_in_parts_that_end_with_its_number(start):
    daemon, known = await start(num_blocks=1400), Known()
    async with Client(daemon.address) as client:
        for number in range(9):
            tokens = [(number * 7 + place * 5) % 250 for place in range(150 * BLOCK)]
            assert [delta async for delta in client.generate(tokens, ONE)]
        batches = client.kv_events()
        parts = [await anext(batches), await anext(batches)]
        for part in parts:
            known.apply(part)
        assert [(part.snapshot.index, part.snapshot.count) for part in parts] == [(0, 2), (1, 2)]
        assert parts[1].sequence_number == parts[0].sequence_number + 1
        assert len(parts[0].events) == EVENTS_A_MESSAGE
        assert known.keys == cached_keys(daemon.engine)
        assert [delta async for delta in client.generate("b" * 40, ONE)]
        known.apply(await anext(batches))
        assert (known.num_gaps, known.keys) == (0, cached_keys(daemon.engine))
        await batches.aclose()


class SlowSubscriber:
    """One with a window of 1 KiB that reads only when it is told to."""

    def __init__(self, connection, stream_id):
        self.connection, self.stream_id, self.num_read = connection, stream_id, 0

    async def read(self):
        """The next batch."""
        async with asyncio.timeout(20):
            while True:
                data = b"".join(self.connection.data.get(self.stream_id, ()))[self.num_read :]
                size = 5 + int.from_bytes(data[1:5], "big")
                if len(data) >= max(size, 5):
                    self.num_read += size
                    return pb.KvEventBatch.FromString(data[5:size])
                await self.connection._read()


async def test_a_slow_subscriber_loses_events_and_is_mended_by_a_snapshot(
    start, eventually, monkeypatch, raw_open, framed
):
    monkeypatch.setattr(feed_module, "MOST_PENDING_EVENTS", 150)
    daemon, known, quick = await start(), Known(), Known()
    connection = await raw_open(daemon.address, 1024)
    async with Client(daemon.address) as client, following(client.kv_events(), quick):

        async def agrees():
            return quick.last is not None and quick.keys == cached_keys(daemon.engine)

        await eventually(agrees)
        request = framed(pb.SubscribeKvEventsRequest())
        slow = SlowSubscriber(connection, await connection.send("/pykv.v1.Engine/SubscribeKvEvents", request))
        known.apply(await slow.read())
        await load(client, 80)
        await eventually(agrees)
        assert (quick.num_gaps, quick.num_snapshots) == (0, 1)
        num_batches = quick.last - known.last
        num_read = 0
        while known.last < quick.last:
            known.apply(await slow.read())
            num_read += 1
    assert known.num_snapshots == 2
    assert num_read < num_batches / 2
    assert known.keys == cached_keys(daemon.engine)
    await connection.close()


@pytest.mark.parametrize("protocol", [pb, vllm])
async def test_a_subscriber_that_reads_nothing_for_too_long_is_ended(
    start, raw_open, framed, protocol, eventually
):
    daemon = await start(stall_timeout=0.1)
    connection = await raw_open(daemon.address, 1024)
    path = f"/{protocol.DESCRIPTOR.package}.{'Engine' if protocol is pb else 'VllmEngine'}/SubscribeKvEvents"
    async with Client(daemon.address) as client:
        await load(client, 8)
        stream_id = await connection.send(path, framed(b""))
        await load(client, 8)

    async def is_ended():
        return not len(daemon.daemon._calls)

    await eventually(is_ended)
    status, message = await connection.status(stream_id)
    assert (status, "read nothing" in message) == (8, True)
    await connection.close()


async def test_a_ring_that_overflows_shows_a_gap(start, eventually):
    daemon, known = await start(max_kv_events=3), Known()
    async with Client(daemon.address) as client, following(client.kv_events(), known):
        await load(client, 40)

        async def agrees():
            return known.last is not None and known.keys == cached_keys(daemon.engine)

        await eventually(agrees)
    assert known.num_snapshots > 1


async def test_nothing_is_taken_while_nobody_subscribes(start, eventually):
    daemon = await start()
    async with Client(daemon.address) as client:
        batches = client.kv_events()
        await anext(batches)
        await batches.aclose()

        async def is_left():
            return daemon.engine._thread.event_listener is None

        await eventually(is_left)
        assert [delta async for delta in client.generate("a" * 40, ONE)]
    assert len(daemon.engine.engine.take_events()) == 2


async def test_without_events_and_for_others_than_operators_there_is_no_stream(start, start_daemon, tmp_path):
    daemon = await start_daemon()
    async with Client(daemon.address) as client:
        with pytest.raises(ServiceError, match=r"UNIMPLEMENTED: .*--max-kv-events"):
            await anext(client.kv_events())
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.acme]\ntoken_sha256 = ["{hashlib.sha256(b"acme").hexdigest()}"]')
    daemon = await start(tenants=str(path))
    async with Client(daemon.address, token="acme") as client:
        with pytest.raises(ServiceError, match="PERMISSION_DENIED"):
            await anext(client.kv_events())


@pytest.mark.parametrize("protocol", ["pykv.v1", "gateway"])
async def test_who_is_operator_no_more_or_revoked_loses_its_stream_at_the_reload(start, tmp_path, protocol):
    digest = hashlib.sha256(b"acme").hexdigest()
    acme = f'[tenants.acme]\ntoken_sha256 = ["{digest}"]\n'
    other = f'[tenants.other]\ntoken_sha256 = ["{hashlib.sha256(b"other").hexdigest()}"]\noperator = true\n'
    path = tmp_path / "tenants.toml"
    path.write_text(f"{acme}operator = true\n{other}")
    daemon = await start(tenants=str(path))
    for first, content, status in ((10, acme, "PERMISSION_DENIED"), (100, "", "UNAUTHENTICATED")):
        path.write_text(f"{acme}operator = true\n{other}")
        await daemon.daemon.reload()
        async with (
            subscribed(daemon, protocol, "acme") as lost,
            subscribed(daemon, protocol, "other") as kept,
        ):
            path.write_text(content + other)
            await daemon.daemon.reload()
            async with Client(daemon.address, token="other") as client:
                assert [delta async for delta in client.generate(list(range(first, first + 40)), ONE)]
            await kept()
            with pytest.raises((ServiceError, GRPCError)) as end:
                await lost()
            found = end.value.status
            assert getattr(found, "name", found) == status


@asynccontextmanager
async def subscribed(daemon, protocol, token):
    """A subscription that has got its snapshot: what gives its next batch."""
    if protocol == "pykv.v1":
        async with Client(daemon.address, token=token) as client:
            batches = client.kv_events()
            await anext(batches)
            yield lambda: anext(batches)
            await batches.aclose()
        return
    host, port = daemon.address.split(":")
    method = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name["SubscribeKvEvents"]
    channel = PatientChannel(host, int(port))
    stream = channel.request(
        path_of(method),
        cardinality_of(method),
        common.SubscribeKvEventsRequest,
        common.KvEventBatch,
        metadata={"authorization": f"Bearer {token}"},
    )
    with suppress(GRPCError, StreamClosedError):  # the one that was ended
        async with stream:
            await stream.send_message(common.SubscribeKvEventsRequest(), end=True)
            assert await stream.recv_message()

            async def following_batch():
                batch = await stream.recv_message()
                if batch is None:
                    await stream.recv_trailing_metadata()
                return batch

            yield following_batch
            await stream.cancel()
    channel.close()


async def test_a_daemon_that_ends_waits_for_no_subscriber(start, collect):
    daemon = await start(drain_timeout=600.0)
    async with Client(daemon.address) as client:
        batches = client.kv_events()
        await anext(batches)
        rest = asyncio.create_task(collect(batches))
        await daemon.stop()
        assert await rest == []


# --- as the gateway reads them ---


def signed(key):
    return int.from_bytes(key[:8], "big", signed=True)


async def test_the_gateway_gets_runs_of_blocks_whose_first_parent_is_none(start, eventually):
    daemon = await start()
    host, port = daemon.address.split(":")
    method = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name["SubscribeKvEvents"]
    channel = PatientChannel(host, int(port))
    tokens = list(range(10, 10 + 3 * BLOCK + 1))
    keys = [signed(key.tobytes()) for key in content_keys(tokens, block_size=BLOCK)]
    async with Client(daemon.address) as client:
        stream = channel.request(
            path_of(method), cardinality_of(method), common.SubscribeKvEventsRequest, common.KvEventBatch
        )
        async with stream:
            await stream.send_message(common.SubscribeKvEventsRequest(), end=True)
            first = await stream.recv_message()
            assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
            assert (first.snapshot.count, first.snapshot.blocks) == (1, 0)
            assert [delta async for delta in client.generate(tokens, ONE)]
            second = await stream.recv_message()
            assert second.sequence_number == first.sequence_number + 1
            (event,) = second.events
            assert not event.stored.HasField("parent_block_hash")
            assert [block.block_hash for block in event.stored.blocks] == keys[1:]
            assert [list(block.token_ids) for block in event.stored.blocks] == [
                tokens[place : place + BLOCK] for place in range(0, 3 * BLOCK, BLOCK)
            ]
            assert [delta async for delta in client.generate([*tokens, *range(100, 130)], ONE)]
            (event,) = (await stream.recv_message()).events
            assert event.stored.parent_block_hash == keys[-1]
            await load(client, 40)
            removed = []
            while not removed:
                events = (await stream.recv_message()).events
                removed = [event.removed for event in events if event.HasField("removed")]
            assert removed[0].block_hashes
            await stream.cancel()
    channel.close()


# --- over ZeroMQ, decoded by the types that vLLM documents ---


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


def cached_hashes(engine):
    return {int.from_bytes(key[:8], "big") for key in cached_keys(engine)}


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


async def test_a_zmq_subscriber_follows_random_load_to_the_cores_own_set(start, eventually):
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


async def test_a_zmq_subscriber_that_missed_batches_is_mended_by_a_replay(start):
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


async def test_a_zmq_subscriber_that_does_not_read_holds_nobody_up(start):
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


# --- the feed alone ---


class Source:
    def __init__(self):
        self.listener, self.sequence = None, 0

    def listen_to_events(self, listener):
        self.listener = listener
        return self.sequence

    def snapshot_events(self):
        return events(self.sequence, 0)

    def tell(self, count, lost=0):
        self.sequence += lost
        told = events(self.sequence, count)
        self.sequence += count
        self.listener(told)


def events(sequence, count):
    keys = np.zeros((count, 32), np.uint8)
    return KvEvents(
        sequence, 0, np.full(count, KvEventKind.STORED, np.uint8), keys, keys, np.ones(count, np.bool_),
        np.zeros((count, 16), np.int32),
    )  # fmt: skip


async def test_batches_are_numbered_and_what_the_engine_lost_is_a_gap():
    feed, source = EventFeed(True), Source()
    feed.serve(source)
    with feed.subscribe() as subscription:
        batches = subscription.batches()
        start = (await anext(batches)).number
        source.tell(2)
        source.tell(3)
        taken = [await anext(batches), await anext(batches)]
        assert [(each.number - start, len(each.events), each.is_snapshot) for each in taken] == [
            (1, 2, False),
            (2, 3, False),
        ]
        source.tell(1, lost=5)
        mended = await anext(batches)
        assert (mended.number - start, mended.is_snapshot) == (4, True)
        await batches.aclose()
    assert source.listener is None
