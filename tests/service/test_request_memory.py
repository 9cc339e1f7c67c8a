"""What requests that are still on their way take: bounded in all, and shared among those who send them."""

import asyncio

import pytest
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest
from h2.events import ConnectionTerminated, PingAckReceived

from pykv.service.errors import RequestMemoryError
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.transport import Offence, TransportLimits, request_memory
from pykv.service.transport import incoming as incoming_module
from pykv.service.transport.incoming import CALL_BYTES, SLOW_AT_ONCE, Incoming
from pykv.service.transport.request_memory import LOST_A_TURN, RequestMemory, Room
from pykv.service.transport.shared_budget import SharedBudget, Sharer
from pykv.service.transport.waiting_line import WaitingLine

GENERATE = "/pykv.v1.Engine/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8


class Message:
    """One that takes room, and remembers whether it lost it."""

    def __init__(self, memory, num_bytes, sharer=None):
        self.memory, self.num_lost = memory, 0
        self.is_behind = False
        self.room = Room(sharer or Sharer("a"), num_bytes, self.lose, lambda: self.is_behind)

    def lose(self):
        self.num_lost += 1

    def begin(self):
        return asyncio.create_task(self.memory.take(self.room))


async def turns(number=2):
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_budget_leaves_some_to_each_connection_and_peer():
    budget = SharedBudget(90)
    first, second, third = Sharer("a"), Sharer("a"), Sharer("b")
    taken = dict.fromkeys((first, second, third), 0)
    for sharer in taken:
        while budget.take(sharer, 1):
            taken[sharer] += 1
    assert list(taken.values()) == [30, 10, 17]  # as much as is left to the peer, and to all
    assert budget.num_taken == 57
    assert budget.take(Sharer("a"), 1) is False
    assert budget.take(Sharer("c"), 12)
    for sharer, number in taken.items():
        budget.give_back(sharer, number)
    assert (budget.num_taken, len(budget._of_peer), len(budget._of_sharer)) == (12, 1, 1)


def test_a_budget_remembers_nobody_it_refused():
    budget = SharedBudget(10, most_of_one=2)
    sharer = Sharer("a")
    assert [budget.take(sharer, number) for number in (3, 2, 1)] == [False, True, False]
    budget.give_back(sharer, 2)
    assert not budget.take(Sharer("b"), 11)
    assert (dict(budget._of_peer), dict(budget._of_sharer)) == ({}, {})


def test_peers_and_their_connections_have_turns_and_each_in_its_order():
    line, memory = WaitingLine(), None
    one, other, lone = Sharer("many"), Sharer("many"), Sharer("lone")
    order = [(one, 3), (other, 1), (lone, 2)]
    rooms = {
        place: Message(memory, place, sharer).room
        for place, sharer in enumerate(sharer for sharer, number in order for _ in range(number))
    }
    for room in rooms.values():
        line.add(room)
    line.discard(rooms[1])
    line.discard(rooms[1])
    assert len(line) == 5
    assert [line.take_first().num_bytes for _ in range(5)] == [0, 4, 3, 5, 2]
    assert (len(line), len(line._peers)) == (0, 0)


@pytest.mark.asyncio
async def test_who_waits_is_not_overtaken_by_smaller_ones_of_others():
    memory = RequestMemory(400, 10)
    holds = [Message(memory, 150) for _ in range(2)]
    for message in holds:
        await memory.take(message.room)
    flood, polite = (
        [Message(memory, 100, Sharer("flood")) for _ in range(20)],
        Message(memory, 290, Sharer("b")),
    )
    tasks = [message.begin() for message in (*flood[:10], polite, *flood[10:])]
    await turns()
    assert memory.num_waiting == 21
    memory.leave(holds[0].room)
    memory.leave(holds[1].room)  # one of the flood had its turn, and it is the turn of the other
    memory.leave(flood[0].room)
    await turns()
    assert polite.room.is_given
    assert sum(message.room.is_given for message in flood) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    memory.leave(polite.room)
    assert (memory.num_bytes, memory.num_waiting, memory.beginnings.num_taken) == (0, 0, 0)
    assert memory._next_look is None


@pytest.mark.asyncio
async def test_small_and_large_messages_starve_neither():
    memory = RequestMemory(400, 50)
    small = [Message(memory, 50) for _ in range(8)]
    for message in small:
        await memory.take(message.room)  # all of it, since no large one waits
    large, more = Message(memory, 300), Message(memory, 50)
    tasks = [large.begin(), more.begin()]
    await turns()
    for message in small[:6]:
        memory.leave(message.room)
    await turns()
    assert (large.room.is_given, more.room.is_given) == (True, False)  # two small ones have their quarter
    memory.leave(small[6].room)
    await asyncio.gather(*tasks)
    huge = Message(memory, 500)
    task = huge.begin()
    await turns()
    assert not huge.room.is_given
    memory.leave(large.room)
    await task  # alone among the large, any has room


@pytest.mark.asyncio
async def test_room_that_a_cancelled_call_waited_for_goes_to_the_next():
    memory = RequestMemory(400, 50)
    holds = Message(memory, 300)
    await memory.take(holds.room)
    cancelled, waits = Message(memory, 250), Message(memory, 260)
    tasks = [message.begin() for message in (cancelled, waits)]
    await turns()
    tasks[0].cancel()
    memory.leave(holds.room)  # before the cancelled one has had its turn
    await tasks[1]
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert tasks[0].cancelled()
    assert (memory.num_bytes, memory.num_waiting, memory.beginnings.num_taken) == (260, 0, 0)


@pytest.mark.asyncio
async def test_what_waits_is_bounded_for_each_connection():
    memory = RequestMemory(400, 2**20)
    await memory.take(Message(memory, 400).room)
    flood = Sharer("flood")
    tasks = [Message(memory, 100, flood).begin() for _ in range(5)]
    await turns()
    refused = [task for task in tasks if task.done()]
    for task in refused:
        with pytest.raises(RequestMemoryError, match="no room for the request's message"):
            await task
    assert (len(refused), memory.num_waiting) == (3, 2)  # of 4 MiB
    polite = Message(memory, 100, Sharer("polite")).begin()
    await turns()
    assert memory.num_waiting == 3
    for task in (*tasks, polite):
        task.cancel()
    await asyncio.gather(*tasks, polite, return_exceptions=True)


@pytest.mark.asyncio
async def test_rooms_are_lost_a_few_in_a_turn_and_no_more_than_are_needed(monkeypatch):
    monkeypatch.setattr(request_memory, "SLOW_SECONDS", 0.0)
    memory = RequestMemory(4000, 1)
    rooms = [Message(memory, 10) for _ in range(300)]
    for message in rooms:
        await memory.take(message.room)
    waits = [Message(memory, 500), Message(memory, 10)]
    tasks = [message.begin() for message in waits]
    lost, seen = 0, []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        before, lost = lost, sum(message.num_lost for message in rooms)
        seen.append(lost - before)
    assert max(seen) == LOST_A_TURN
    assert (lost, memory.num_bytes) == (51, 3000)
    assert all(message.num_lost for message in rooms[:51])  # the oldest
    assert not any(message.num_lost for message in waits)


@pytest.mark.asyncio
async def test_room_that_is_given_while_others_wait_is_lost_too(monkeypatch):
    monkeypatch.setattr(request_memory, "SLOW_SECONDS", 0.01)
    memory = RequestMemory(400, 10)
    holds, waits = Message(memory, 200), Message(memory, 300)
    await memory.take(holds.room)
    task = waits.begin()
    await turns()
    given = Message(memory, 10)
    await memory.take(given.room)
    later = Message(memory, 300)
    last = later.begin()
    await task
    await last
    assert (holds.num_lost, given.num_lost, waits.num_lost) == (1, 1, 1)


@pytest.mark.asyncio
async def test_rooms_that_were_left_are_not_remembered():
    memory = RequestMemory(400, 10)
    for _ in range(1000):
        room = Message(memory, 5).room
        await memory.take(room)
        memory.leave(room)
    assert not memory._silent


@pytest.fixture
def looked_after():
    """Asks a memory in whose line somebody waits to look for what is overdue, as if so many seconds had gone by."""

    def look(memory, seconds):
        for room in (*memory._silent, *memory._heard):
            room.due -= seconds
        memory._next_look.cancel()
        memory._look()

    return look


@pytest.mark.asyncio
async def test_rooms_of_which_nothing_came_are_lost_before_those_that_stand_still_and_none_that_goes_on(
    looked_after,
):
    memory = RequestMemory(4000, 1)
    goes_on, stands_still, drips, _ = messages = [Message(memory, 640) for _ in range(4)]
    for message in messages:
        await memory.take(message.room)
    memory.hear(stands_still.room, 20)
    waits = [Message(memory, 1000 + 640 * place) for place in range(3)]
    tasks = [message.begin() for message in waits]
    await turns()
    assert memory.num_waiting == 3
    looked_after(memory, 0.75)
    for _ in range(19):
        memory.hear(drips.room, 1)  # less than a part in 32
    memory.hear(goes_on.room, 20)
    assert [message.num_lost for message in messages] == [0, 0, 0, 0]
    looked_after(memory, 0.5)
    await turns()
    assert [message.num_lost for message in messages] == [0, 1, 1, 1]
    assert [message.room.num_come for message in messages] == [20, 20, 19, 0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_no_more_rooms_are_lost_than_are_needed_and_the_silent_first(looked_after):
    memory = RequestMemory(2560, 1)  # three quarters for large ones
    first, second, _ = messages = [Message(memory, 640) for _ in range(3)]
    for message in messages:
        await memory.take(message.room)
    memory.hear(second.room, 640)
    memory.hear(first.room, 640)
    task = Message(memory, 640).begin()
    await turns()
    looked_after(memory, 2.0)
    await task
    assert [message.num_lost for message in messages] == [0, 0, 1]
    task = Message(memory, 640).begin()
    await turns()
    memory.hear(next(iter(memory._silent)), 640)  # the one that came after
    looked_after(memory, 2.0)
    await task
    assert [message.num_lost for message in messages] == [0, 1, 1]


@pytest.mark.asyncio
async def test_no_room_is_lost_because_the_daemon_is_behind(looked_after):
    memory = RequestMemory(2560, 1)
    messages = [Message(memory, 640) for _ in range(3)]
    for message in messages:
        await memory.take(message.room)
    memory.hear(messages[2].room, 640)
    messages[0].is_behind = messages[2].is_behind = True
    tasks = [Message(memory, 640).begin() for _ in range(2)]
    await turns()
    looked_after(memory, 2.0)
    assert [message.num_lost for message in messages] == [0, 1, 0]
    messages[0].is_behind = False
    looked_after(memory, 0.5)  # since it was found behind
    assert [message.num_lost for message in messages] == [0, 1, 0]
    looked_after(memory, 1.0)
    await asyncio.gather(*tasks)
    assert [message.num_lost for message in messages] == [1, 1, 0]


@pytest.mark.asyncio
async def test_the_daemon_is_behind_while_it_has_not_looked_at_all_that_was_sent(start_daemon, raw_open):
    daemon = await start_daemon()
    raw = await raw_open(daemon.address)
    raw.h2.ping(b"12345678")
    await raw.flush()
    await raw.wait_for(PingAckReceived)
    (protocol,) = daemon.daemon._server._connections
    incoming, ping = protocol.connection.incoming, b"\0\0\x08\x06" + bytes(5 + 8)
    assert not incoming.is_behind()
    protocol._backlog.append(ping)
    assert incoming.is_behind()
    protocol.feed()
    assert not incoming.is_behind()
    await raw.close()


@pytest.mark.asyncio
async def test_what_came_by_and_by_is_heard_once_it_is_enough_and_nothing_after_its_room_was_left():
    memory = RequestMemory(2**30, 1)
    large, small, tiny = (Message(memory, num_bytes).room for num_bytes in (2**24, 640, 5))
    for room in (large, small, tiny):
        await memory.take(room)
    assert [room.least_bytes for room in (large, small, tiny)] == [16 * 1024, 20, 0]
    for _ in range(2):
        memory.hear(large, 8 * 1024)
        memory.hear(small, 9)
    memory.hear(tiny, 1)
    assert (list(memory._silent), list(memory._heard)) == ([small], [large, tiny])
    assert (large.num_come, large.num_new, small.num_new) == (16 * 1024, 0, 18)
    for room in (large, small, tiny):
        memory.leave(room)
        memory.hear(room, 2**20)
    assert (memory._silent, memory._heard, memory.num_bytes) == ({}, {}, 0)
    assert large.num_come == 16 * 1024


def test_who_made_others_wait_for_nothing_too_often_is_told_apart():
    incoming = Incoming(TransportLimits(control_frames_per_second=1e-9), RequestMemory(400, 10), Sharer("a"))
    for _ in range(SLOW_AT_ONCE):
        assert not incoming.are_too_slow
        incoming.count_slow()
    assert not incoming.are_too_slow
    incoming.count_slow()
    assert incoming.are_too_slow


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
    daemon = await start_daemon(
        request_memory=800_000, max_message_size=200_000, control_frames_per_second=0.001
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
        return sum(room.num_come for room in memory._silent) == 3 * more

    await eventually(all_have_come)
    waiting = [await second.send(GENERATE, framed(b"", length=200_000), end_stream=False) for _ in range(3)]
    statuses = [(await first.status(stream_id))[0] for stream_id in streams]
    assert statuses == [RESOURCE_EXHAUSTED] * 3
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
    daemon = await start_daemon(request_memory=400_000, max_message_size=200_000)
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
    assert 0.9 < max(begun) / (4 * 2**20 / 3 / each) < 1.1
    streams = [second.request(CHECK, end_stream=False) for _ in range(300)]
    await second.flush()
    assert await second.status(streams[-1]) == refused
    assert server._memory.beginnings.num_taken < 2 * 2**20
    probe = await polite.send(CHECK, framed(HealthCheckRequest()))
    assert (await polite.status(probe))[0] == 0
    for connection in (first, second, polite):
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
