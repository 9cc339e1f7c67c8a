"""Requests on their way to a daemon: who has room, who waits for it, and who loses it."""

import asyncio
import hashlib

import pytest
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest
from h2.events import ConnectionTerminated, PingAckReceived

from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import Offence, room_queue
from pykv.service.transport import incoming as incoming_module
from pykv.service.transport.incoming import Incoming
from pykv.service.transport.request_memory import CALL_BYTES, OWN_BYTES
from pykv.service.transport.room import Room
from pykv.service.transport.shared_budget import Sharer

GENERATE = "/pykv.v1.Engine/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8


@pytest.mark.asyncio
async def test_who_finds_no_room_waits_and_small_and_whole_ones_do_not(
    start_daemon, raw_open, framed, eventually
):
    daemon = await start_daemon(request_memory=400_000, max_message_size=200_000)
    memory = daemon.daemon._server._memory
    first, second = [await raw_open(daemon.address) for _ in range(2)]
    large = framed(b"\xff" * 65_000, length=200_000)
    begun = await first.send(GENERATE, large, end_stream=False)

    async def one_is_in():
        return memory.num_bytes == 200_000

    await eventually(one_is_in)
    waits = await second.send(GENERATE, large, end_stream=False)

    async def one_waits():
        return memory.num_waiting == 1

    await eventually(one_waits)
    assert memory.num_bytes == 200_000
    assert second.h2.local_flow_control_window(waits) < 1000
    whole = await second.send(
        GENERATE, framed(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)))
    )
    assert await second.status(whole) == (0, "")
    first.h2.reset_stream(begun)
    await first.flush()
    async with asyncio.timeout(20):
        while second.h2.local_flow_control_window(waits) < 135_000:
            await second._read()
    assert (memory.num_bytes, memory.num_waiting) == (200_000, 0)
    for connection in (first, second):
        await connection.close()

    async def all_is_given_back():
        return memory.num_bytes == 0

    await eventually(all_is_given_back)


@pytest.mark.asyncio
async def test_a_message_that_stands_still_makes_room_for_those_that_wait(
    start_daemon, raw_open, framed, eventually
):
    daemon = await start_daemon(request_memory=400_000, max_message_size=200_000)
    first, second = [await raw_open(daemon.address) for _ in range(2)]
    large = framed(b"\xff" * 65_000, length=200_000)
    stands_still = await first.send(GENERATE, large, end_stream=False)

    async def one_is_in():
        return daemon.daemon._server._memory.num_bytes == 200_000

    await eventually(one_is_in)
    goes_on = await second.send(GENERATE, framed(b"\xff" * 200_000))
    status, message = await first.status(stands_still)
    assert (status, "nothing more of the request message came within 1 s" in message) == (
        RESOURCE_EXHAUSTED,
        True,
    )
    assert "others wait for its room" in message
    assert first.trailers[stands_still]["retry-after-ms"] == "1000"
    assert (await second.status(goes_on))[0] == INVALID_ARGUMENT  # it was read
    for connection in (first, second):
        await connection.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [0, 1])
async def test_only_who_sent_nothing_for_its_room_is_sent_away(
    start_daemon, raw_open, framed, eventually, monkeypatch, more
):
    monkeypatch.setattr(incoming_module, "SLOW_AT_ONCE", 1)
    heard, hear = [], Incoming.hear

    def note(self, room, num_bytes):
        hear(self, room, num_bytes)
        heard.append(num_bytes)

    monkeypatch.setattr(Incoming, "hear", note)
    daemon = await start_daemon(
        request_memory=2_400_000, max_message_size=200_000, control_frames_per_second=0.001
    )
    memory = daemon.daemon._server._memory
    first, second = [await raw_open(daemon.address) for _ in range(2)]
    streams = [await first.send(GENERATE, framed(b"", length=200_000), end_stream=False) for _ in range(3)]

    async def all_are_in():
        return memory.num_bytes == 600_000

    await eventually(all_are_in)
    for stream_id in streams:
        first.h2.send_data(stream_id, b"\xff" * more)
    await first.flush()

    async def all_have_come():
        return sum(heard) == 3 * more

    await eventually(all_have_come)
    waiting = [await second.send(GENERATE, framed(b"", length=200_000), end_stream=False) for _ in range(3)]
    statuses = [(await first.status(stream_id))[0] for stream_id in streams[:2]]
    assert statuses == [RESOURCE_EXHAUSTED] * 2
    first.h2.ping(b"12345678")
    await first.flush()
    if more:
        await first.wait_for(PingAckReceived)
    else:
        goodbye = await first.wait_for(ConnectionTerminated)
        assert goodbye.additional_data.decode() == Offence.SLOW_REQUESTS.value
    assert daemon.daemon._server.num_closed == ({} if more else {Offence.SLOW_REQUESTS: 1})
    assert len(waiting) == 3
    for connection in (first, second):
        await connection.close()


@pytest.mark.asyncio
async def test_those_that_wait_leave_the_connections_window_to_others(
    start_daemon, raw_open, framed, eventually
):
    daemon = await start_daemon(request_memory=64 * 2**20)
    memory = daemon.daemon._server._memory
    await memory.take(Room(Sharer("another"), 48 * 2**20, lambda: None))
    raw = await raw_open(daemon.address)
    waiting = [raw.request(GENERATE, framed(b"", length=300_000), end_stream=False) for _ in range(60)]
    await raw.flush()

    async def all_wait():
        return memory.num_waiting == len(waiting)

    await eventually(all_wait)
    for stream_id in waiting:
        for _ in range(4):
            raw.h2.send_data(stream_id, b"\xff" * 16_000)
        await raw.flush()
    raw.h2.ping(b"12345678")
    await raw.flush()
    await raw.wait_for(PingAckReceived)
    assert raw.h2.outbound_flow_control_window > 2**21
    await raw.close()


@pytest.mark.asyncio
async def test_a_message_has_its_room_until_its_request_has_ended(start_daemon, raw_open, framed, eventually):
    daemon = await start_daemon(request_memory=402_000, max_message_size=200_000)
    memory = daemon.daemon._server._memory
    whole = framed(pb.GenerateRequest(text="x" * 100_000, sampling=pb.SamplingParams(max_tokens=1)))
    connections = [await raw_open(daemon.address) for _ in range(4)]
    streams = [await connection.send(GENERATE, whole, end_stream=False) for connection in connections[:2]]
    late = await connections[2].send(GENERATE, whole[:60_000], end_stream=False)

    async def one_waits():
        return (memory.num_waiting, memory.num_bytes) == (1, 2 * (len(whole) - 5))

    await eventually(one_waits)
    assert not daemon.engine.scopes  # nothing was handed on
    connections[0].h2.end_stream(streams[0])
    await connections[0].flush()
    assert (await connections[0].status(streams[0]))[0] == INVALID_ARGUMENT  # it was read, and is too long
    connections[2].h2.send_data(late, whole[60_000:65_000])

    async def goes_on():
        return memory.num_waiting == 0

    await eventually(goes_on)
    for connection in connections:
        await connection.close()

    async def all_is_given_back():
        return (memory.num_bytes, memory.beginnings.num_taken) == (0, 0)

    await eventually(all_is_given_back)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [GENERATE, CHECK])
async def test_the_end_of_a_request_must_come_in_time_too(start_daemon, raw_open, framed, path):
    daemon = await start_daemon(request_timeout=0.1)
    raw = await raw_open(daemon.address)
    stream_id = await raw.send(path, framed(b""), end_stream=False)
    message = "the end of the request did not come within 0.1 s"
    assert await raw.status(stream_id) == (RESOURCE_EXHAUSTED, message)
    await raw.close()


@pytest.mark.asyncio
async def test_who_waits_for_room_until_the_end_of_its_time_may_come_again(start_daemon, raw_open, framed):
    daemon = await start_daemon(request_timeout=0.1, request_memory=400_000)
    await daemon.daemon._server._memory.take(Room(Sharer("another"), 300_000, lambda: None))
    raw = await raw_open(daemon.address)
    stream_id = await raw.send(GENERATE, framed(b"", length=100_000), end_stream=False)
    status, message = await raw.status(stream_id)
    assert (status, "no room for the request's message" in message) == (RESOURCE_EXHAUSTED, True)
    assert raw.trailers[stream_id]["retry-after-ms"] == "1000"
    await raw.close()


@pytest.mark.asyncio
async def test_what_has_come_while_it_waited_needs_no_room(start_daemon, raw_open, framed, eventually):
    daemon = await start_daemon(request_memory=400_000)
    memory = daemon.daemon._server._memory
    await memory.take(Room(Sharer("another"), 60_000, lambda: None))
    await memory.take(Room(Sharer("another"), 340_000, lambda: None))
    raw = await raw_open(daemon.address)
    request = framed(pb.GenerateRequest(text="x" * 60_000, sampling=pb.SamplingParams(max_tokens=1)))
    stream_id = await raw.send(GENERATE, request[:50_000], end_stream=False)

    async def waits():
        return memory.num_waiting == 1

    await eventually(waits)
    raw.h2.send_data(stream_id, request[50_000:], end_stream=True)
    await raw.flush()
    assert (await raw.status(stream_id))[0] == INVALID_ARGUMENT  # it was read, and is too long
    assert memory.num_bytes == 400_000
    await raw.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("extra", [b"\0", b"\0\0\0\0\0"])
async def test_what_follows_the_only_message_ends_the_call_at_once(raw, framed, extra):
    stream_id = await raw.send(CHECK, framed(b"") + extra, end_stream=False)
    status, message = await raw.status(stream_id)
    assert (status, "several request messages" in message) == (INVALID_ARGUMENT, True)


@pytest.mark.asyncio
async def test_calls_without_a_message_are_bounded_by_what_they_take(start_daemon, raw_open, framed):
    """Their headers, of which HTTP/2 lets each byte stand for thousands, count as they are kept."""
    daemon = await start_daemon(request_memory=2**20)
    server = daemon.daemon._server
    first, second, polite = [await raw_open(daemon.address) for _ in range(3)]
    filler = ("filler", "x" * 3700)
    streams = [first.request(CHECK, end_stream=False, more_headers=[filler] * 4) for _ in range(300)]
    await first.flush()
    refused = (RESOURCE_EXHAUSTED, "no room for the call beside those that have not ended; try again later")
    assert await first.status(streams[-1]) == refused
    assert first.trailers[streams[-1]]["retry-after-ms"] == "1000"
    each = CALL_BYTES + 4 * (len("filler") + 3700 + 32)
    assert server._memory.beginnings.num_taken < 4 * 2**20 / 3 + each
    begun = [len(connection.processor.streams) for connection in server._connections]
    assert sorted(begun) == [0, 0, max(begun)]
    assert 0.9 < max(begun) / ((4 * 2**20 / 3 + OWN_BYTES) / each) < 1.1
    streams = [second.request(CHECK, end_stream=False) for _ in range(300)]
    await second.flush()
    assert await second.status(streams[-1]) == refused
    assert server._memory.beginnings.num_taken < 2 * 2**20
    probe = await polite.send(CHECK, framed(HealthCheckRequest()))
    assert (await polite.status(probe))[0] == 0
    for connection in (first, second, polite):
        await connection.close()


@pytest.mark.asyncio
async def test_a_probe_of_the_same_address_is_served_whatever_others_hold(start_daemon, raw_open, framed):
    """As when all callers come by way of one balancer, and none needs a credential for health."""
    daemon = await start_daemon(request_memory=2**20)
    flood = [await raw_open(daemon.address) for _ in range(12)]
    refused = []
    for connection in flood:
        streams = [connection.request(CHECK, end_stream=False) for _ in range(300)]
        await connection.flush()
        refused.append(await connection.status(streams[-1]))
    assert {status for status, _ in refused} == {RESOURCE_EXHAUSTED}
    polite = await raw_open(daemon.address)
    probe = await polite.send(CHECK, framed(HealthCheckRequest()))
    assert await polite.status(probe) == (0, "")
    for connection in (*flood, polite):
        await connection.close()


@pytest.mark.asyncio
async def test_requests_that_are_there_at_once_need_no_room_for_waiting(start_daemon, raw_open, framed):
    daemon = await start_daemon(request_memory=2**20)
    flood, polite = [await raw_open(daemon.address) for _ in range(12)], await raw_open(daemon.address)
    for connection in flood:
        streams = [connection.request(CHECK, end_stream=False) for _ in range(300)]
        await connection.flush()
        await connection.status(streams[-1])
    whole = framed(pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)))
    begun = [polite.request(GENERATE, whole) for _ in range(50)]
    await polite.flush()
    assert [await polite.status(stream_id) for stream_id in begun] == [(0, "")] * 50
    for connection in (*flood, polite):
        await connection.close()


@pytest.mark.asyncio
async def test_tenants_share_whatever_address_they_come_from(
    start_daemon, raw_open, framed, eventually, tmp_path, monkeypatch
):
    monkeypatch.setattr(room_queue, "SLOW_SECONDS", 1000.0)  # nobody loses room
    tenants = tmp_path / "tenants.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("flood", "polite")}
    tenants.write_text(
        "".join(f'[tenants.{name}]\ntoken_sha256 = ["{of}"]\n' for name, of in digests.items())
    )
    daemon = await start_daemon(tenants=str(tenants), request_memory=1_600_000)
    memory = daemon.daemon._server._memory
    flood = [await raw_open(daemon.address) for _ in range(12)]
    polite = await raw_open(daemon.address)
    bearer = {name: [("authorization", f"bearer {name}")] for name in digests}
    for connection in flood:
        announced = framed(b"", length=100_000)
        connection.request(GENERATE, announced, end_stream=False, more_headers=bearer["flood"])
        await connection.flush()

    async def tenant_has_half():
        return (memory.num_bytes, memory.num_waiting) == (600_000, 6)

    await eventually(tenant_has_half)
    body = framed(pb.GenerateRequest(text="x" * 99_000, sampling=pb.SamplingParams(max_tokens=1)))
    for _ in range(3):
        async with asyncio.timeout(20):
            stream_id = await polite.send(GENERATE, body, more_headers=bearer["polite"])
        assert (await polite.status(stream_id))[0] == INVALID_ARGUMENT  # it was read, and is too long
    assert memory.num_bytes == 600_000
    for connection in (*flood, polite):
        await connection.close()


@pytest.mark.asyncio
async def test_calls_without_room_are_no_offence(start_daemon, raw_open):
    """The daemon has none, whatever the client did; each is answered, with a hint when to come again."""
    daemon = await start_daemon(request_memory=2**20, control_frames_burst=50, control_frames_per_second=1.0)
    raw = await raw_open(daemon.address)
    streams = [raw.request(CHECK, end_stream=False) for _ in range(300)]
    await raw.flush()
    refused = (RESOURCE_EXHAUSTED, "no room for the call beside those that have not ended; try again later")
    assert [await raw.status(stream_id) for stream_id in streams[-60:]] == [refused] * 60
    assert raw.trailers[streams[-1]]["retry-after-ms"] == "1000"
    assert daemon.daemon._server.num_closed == {}
    await raw.close()


@pytest.mark.asyncio
async def test_a_reflection_call_must_send_each_message_in_time(start_daemon, raw_open, framed):
    daemon = await start_daemon(request_timeout=0.1)
    raw = await raw_open(daemon.address)
    asked = framed(ServerReflectionRequest(list_services=""))
    message = "the request message did not come within 0.1 s"
    for rest in (b"", framed(b"", length=4096)):
        stream_id = await raw.send(REFLECTION, asked + rest, end_stream=False)
        assert await raw.status(stream_id) == (RESOURCE_EXHAUSTED, message)
        assert raw.data_of(stream_id)
    await raw.close()
