"""KV events as streams of pykv.v1 and of the gateway: order, gaps, snapshots, slow subscribers, and the same set as the
core's in the end."""

import asyncio
import hashlib
import itertools
from contextlib import asynccontextmanager, suppress

import pytest
from grpclib.exceptions import GRPCError
from h2.exceptions import StreamClosedError
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from pykv.client import Client, ServiceError
from pykv.events import content_keys
from pykv.sampling import SamplingParams
from pykv.service.client.channel import PatientChannel
from pykv.service.kv_events import feed as feed_module
from pykv.service.kv_events.messages import EVENTS_A_MESSAGE
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


async def test_a_subscriber_follows_random_load_to_the_cores_own_set(start, eventually, load, cached_keys):
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


async def test_a_large_snapshot_comes_in_parts_that_end_with_its_number(start, cached_keys):
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
    start, eventually, monkeypatch, raw_open, framed, load, cached_keys
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
    start, raw_open, framed, protocol, eventually, load
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


async def test_a_ring_that_overflows_shows_a_gap(start, eventually, load, cached_keys):
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


def signed(key):
    return int.from_bytes(key[:8], "big", signed=True)


async def test_the_gateway_gets_runs_of_blocks_whose_first_parent_is_none(start, eventually, load):
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
