"""What requests that are still on their way take: bounded in all, and shared among those who send them."""

import asyncio

import pytest
from h2.events import PingAckReceived

from pykv.service.errors import RequestMemoryError
from pykv.service.transport import TransportLimits, request_memory
from pykv.service.transport.incoming import SLOW_AT_ONCE, Incoming
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
