"""What requests that are still on their way take: bounded in all, and shared among those who send them."""

import asyncio
import gc
from itertools import pairwise

import pytest
import pytest_asyncio
from h2.events import PingAckReceived

from pykv.fair_line import FairLine
from pykv.service.errors import RequestMemoryError
from pykv.service.transport import TransportLimits
from pykv.service.transport.incoming import SLOW_AT_ONCE, Incoming
from pykv.service.transport.request_memory import RequestMemory
from pykv.service.transport.room import MOST_PUT_OFF, Room
from pykv.service.transport.room_group import Group, Member
from pykv.service.transport.room_pool import RoomPool
from pykv.service.transport.room_queue import LOST_A_TURN, RoomQueue
from pykv.service.transport.shared_budget import SharedBudget, Sharer

GENERATE = "/pykv.v1.Engine/Generate"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8


class Message:
    """One that takes room, and remembers whether it lost it."""

    def __init__(self, memory, num_bytes, sharer=None, group=None):
        self.memory, self.num_lost = memory, 0
        self.is_behind = False
        self.room = Room(sharer or Sharer("a"), num_bytes, self.lose, lambda: self.is_behind, group)

    def lose(self):
        self.num_lost += 1

    def begin(self):
        return asyncio.create_task(self.memory.take(self.room))


def queue_of(max_bytes, max_waiting=1000):
    return RoomQueue(RoomPool(max_bytes, max_waiting))


async def given(memory, *messages):
    """The same messages, which have room."""
    for message in messages:
        await memory.take(message.room)
    return messages


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def turns(number=2):
    for _ in range(number):
        await asyncio.sleep(0)


class Clock:
    """The time of the event loop, which stands still unless a test lets it go on."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        return self.now

    async def go_on(self, seconds):
        self.now += seconds
        await turns(3)


@pytest_asyncio.fixture
async def clock(monkeypatch):
    made, loop, problems = Clock(), asyncio.get_running_loop(), []
    monkeypatch.setattr(loop, "time", made.time)
    loop.set_exception_handler(lambda _, context: problems.append(context))
    yield made
    assert problems == []


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
    assert (budget.num_taken, len(budget._of_group), len(budget._of_sharer)) == (12, 1, 1)


def test_a_budget_remembers_nobody_it_refused():
    budget = SharedBudget(10, most_of_one=2)
    sharer = Sharer("a")
    assert [budget.take(sharer, number) for number in (3, 2, 1)] == [False, True, False]
    budget.give_back(sharer, 2)
    assert not budget.take(Sharer("b"), 11)
    assert (dict(budget._of_group), dict(budget._of_sharer)) == ({}, {})


def test_what_is_a_connections_own_is_not_counted_and_nobody_else_takes_it():
    budget = SharedBudget(9, most_of_one=9, of_its_own=2)
    flood = [Sharer("a") for _ in range(9)]
    taken = [next(number for number in range(99) if not budget.take(sharer, 1)) for sharer in flood]
    assert taken == [5, 3, 3, 2, 2, 2, 2, 2, 2]  # two of each, and of the rest a third, and so on
    assert budget.num_taken == 5
    for sharer, number in zip(flood, taken, strict=True):
        for _ in range(number):
            budget.give_back(sharer, 1)
    assert (budget.num_taken, dict(budget._of_group), dict(budget._of_sharer)) == (0, {}, {})


@pytest.mark.asyncio
async def test_a_connection_has_a_third_and_a_group_half_so_that_others_find_room_at_once():
    memory = queue_of(900)
    first, second, tenant = Sharer("a"), Sharer("a"), Sharer("a")
    flood = [Message(memory, 100, sharer) for sharer in (first,) * 5 + (second,) * 3]
    tasks = [message.begin() for message in flood]
    await turns()
    assert [message.room.is_given for message in flood] == [True] * 3 + [False] * 2 + [True] + [False] * 2
    others = [Message(memory, 100, Sharer("b")), Message(memory, 100, tenant, "tenant x")]
    await asyncio.wait_for(given(memory, *others), 1)
    await end(*tasks)


def in_order(pool, *messages):
    """The sharers of messages of so many bytes, in the order in which they have room, one after another."""
    rooms = [Room(sharer, num_bytes, lambda: None) for sharer, num_bytes in messages]
    for room in rooms:
        pool.wait(room)
    while pool.num_waiting:
        room, stuck = pool.turn()
        assert stuck == []
        pool.give(room, 0.0)
        yield room.sharer
    for room in rooms:
        pool.leave(room)
    assert (pool.num_bytes, pool.num_waiting) == (0, 0)


def test_whoever_has_least_is_next_in_groups_and_their_connections_and_then_by_bytes():
    many, other, lone, large = Sharer("many"), Sharer("many"), Sharer("lone"), Sharer("large")
    messages = [(large, 95), (many, 10), (many, 10), (other, 10), (lone, 30), (lone, 30)]
    expected = [many, lone, large, other, lone, many]
    assert list(in_order(RoomPool(10_000, 99), *messages)) == expected


def test_who_has_as_much_already_is_passed_over_and_who_wants_more_than_is_left_is_not_for_ever():
    pool, sharers = RoomPool(1000, 99), {}

    def room(name, num_bytes, *, give=False):
        made = Room(sharers.setdefault(name, Sharer(name)), num_bytes, lambda: None)
        pool.wait(made)
        if give:
            pool.give(made, 0.0)
        return made

    room("full", 400, give=True)
    room("little", 50, give=True)
    more = room("full", 201)
    assert pool.turn() == (None, [more])
    small = room("other", 300)
    assert pool.turn() == (small, [])
    pool.wait_no_longer(small)
    large = room("lone", 600)
    assert pool.turn() == (None, [large, more])
    num_passed = 0
    while True:
        passes = room("little", 20)
        found, stuck = pool.turn()
        assert stuck[0] is large
        if found is None:
            break
        assert found is passes
        pool.give(passes, 0.0)
        pool.leave(passes)
        num_passed += 1
    assert 20 < num_passed < 60  # of 20 bytes each, where three wait and the large one wants 600
    pool.wait_no_longer(large)
    assert pool.turn() == (passes, [])


def test_turns_give_each_as_many_bytes():
    line = FairLine()
    order, wants = [], {"much": 1000, "little": 100, "some": 250}
    for name, num_bytes in wants.items():
        line.put(name, num_bytes)
    while len(order) < 60:
        order.append(line.first())
        line.serve(order[-1], wants[order[-1]])
        line.put(order[-1], wants[order[-1]])
    got = {name: order.count(name) * num_bytes for name, num_bytes in wants.items()}
    assert (got, order[:5]) == (
        {"much": 4000, "little": 4000, "some": 4000},
        ["little"] * 2 + ["some"] + ["little"] * 2,
    )
    line.put("new", 90)
    assert line.first() == "new"  # it has no claim for the time before, and owes nothing
    assert next(line.in_order()) == "new"
    assert sorted(line.in_order()) == ["little", "much", "new", "some"]
    line.discard("new")
    assert line.first() != "new"
    for name in wants:
        line.forget(name)
    assert (len(line), line._begins, line._tags) == (0, {"new": line._clock}, {})


def test_a_line_keeps_little_of_those_that_changed_their_minds():
    line = FairLine()
    for place in range(10_000):
        line.put(place % 7, place)
    for _ in range(10_000):
        line.discard(0)
        line.put(0, 5)
    assert len(line) == 7
    assert len(line._heap) < 40


@pytest.mark.asyncio
async def test_small_and_large_messages_starve_neither():
    memory = RequestMemory(400, 50)
    await given(memory, Message(memory, 300), Message(memory, 50, Sharer("b")))
    large, small = Message(memory, 51, Sharer("c")), Message(memory, 50, Sharer("c"))
    tasks = [large.begin(), small.begin()]
    await turns()
    assert (large.room.is_given, small.room.is_given) == (False, True)
    await end(*tasks)


@pytest.mark.asyncio
async def test_alone_any_message_has_room_and_small_ones_overtake_it_for_a_while_only():
    memory = queue_of(400)
    (holds,) = await given(memory, Message(memory, 10, Sharer("b")))
    huge = Message(memory, 500)
    tasks = [huge.begin()]
    await turns()
    num_overtook = 0
    while not huge.room.is_given:
        assert num_overtook < 12
        small = Message(memory, 100, Sharer(f"of {num_overtook}"))
        tasks.append(small.begin())
        await turns()
        memory.leave(holds.room)
        holds, num_overtook = small, num_overtook + small.room.is_given
    assert num_overtook == 8  # both wait, so each could have had half of that
    await end(*tasks)


@pytest.mark.asyncio
async def test_room_that_a_cancelled_call_waited_for_goes_to_the_next():
    memory = queue_of(300)
    (holds,) = await given(memory, Message(memory, 300))
    cancelled, waits = Message(memory, 250), Message(memory, 260)
    tasks = [message.begin() for message in (cancelled, waits)]
    await turns()
    tasks[0].cancel()
    memory.leave(holds.room)  # before the cancelled one has had its turn
    await tasks[1]
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert tasks[0].cancelled()
    assert (memory.num_bytes, memory.num_waiting) == (260, 0)


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_as_it_gets_its_room_gives_it_to_the_next():
    memory = queue_of(300)
    (holds,) = await given(memory, Message(memory, 300))
    cancelled, waits = Message(memory, 250), Message(memory, 260)
    tasks = [message.begin() for message in (cancelled, waits)]
    await turns()
    memory.leave(holds.room)
    assert cancelled.room.is_given
    tasks[0].cancel()
    await tasks[1]
    assert (memory.num_bytes, memory.num_waiting) == (260, 0)


@pytest.mark.asyncio
async def test_what_has_come_needs_no_room_and_lets_the_next_have_its_turn():
    memory = queue_of(300)
    await given(memory, Message(memory, 200, Sharer("full")))
    large, small = Message(memory, 250), Message(memory, 20)
    tasks = [message.begin() for message in (large, small)]
    await turns()
    memory.excuse(large.room)
    memory.excuse(large.room)
    await asyncio.gather(*tasks)
    assert (large.room.is_given, small.room.is_given) == (False, True)


@pytest.mark.asyncio
async def test_of_too_many_that_wait_the_last_one_of_whoever_has_most_is_refused():
    memory = queue_of(400, max_waiting=8)
    await given(memory, Message(memory, 400, Sharer("full")))
    flood, other = Sharer("flood"), Sharer("flood")
    floods = [Message(memory, 100, flood).begin() for _ in range(10)]
    await turns(3)
    assert [task.done() for task in floods] == [False] * 8 + [True] * 2
    same_group = [Message(memory, 100, other).begin() for _ in range(4)]
    await turns(3)
    assert [task.done() for task in floods] == [False] * 5 + [True] * 5
    assert [task.done() for task in same_group] == [
        False,
        False,
        False,
        True,
    ]  # as many, to the order of magnitude
    others = [Message(memory, 100, Sharer("b")).begin() for _ in range(3)]
    await turns(3)
    assert not any(task.done() for task in others)
    for task in floods[5:]:
        with pytest.raises(RequestMemoryError, match="no room for the request's message"):
            await task
    assert memory.num_waiting == 8
    await end(*floods, *same_group, *others)


@pytest.mark.asyncio
async def test_rooms_are_lost_a_few_in_a_turn_and_no_more_than_are_needed(clock):
    memory = queue_of(4000)
    rooms = await given(memory, *(Message(memory, 10, Sharer(str(place))) for place in range(390)))
    waits = [Message(memory, 500, Sharer("b")), Message(memory, 10, Sharer("c"))]
    tasks = [message.begin() for message in waits]
    await turns()
    lost = [sum(message.num_lost for message in rooms)]
    clock.now += 2.0
    while not all(task.done() for task in tasks):
        lost.append(sum(message.num_lost for message in rooms))
        await asyncio.sleep(0)
    steps = [after - before for before, after in pairwise(lost)]
    assert (lost[0], max(steps)) == (0, LOST_A_TURN)
    needed = 41  # 390 * 10 + 510 - 4000
    assert sum(message.num_lost for message in rooms[:needed]) == needed  # the oldest
    assert not any(message.num_lost for message in (*rooms[needed:], *waits))


@pytest.mark.asyncio
@pytest.mark.parametrize("is_last", [False, True])
async def test_a_call_that_is_cancelled_in_the_turn_of_a_look_leaves_its_turn_to_the_next(clock, is_last):
    memory = queue_of(1200)
    (holds,) = await given(memory, Message(memory, 500, Sharer("full")))
    large = Message(memory, 800, Sharer("b")).begin()
    fits = Message(memory, 650, Sharer("c"))
    tasks = [large] if is_last else [large, Message(memory, 720, Sharer("d")).begin(), fits.begin()]
    await turns()
    for task in [large] if is_last else tasks[:2]:
        asyncio.get_running_loop().call_later(0.9, task.cancel)
    clock.now += 1.1
    await turns(2)  # the look is in the same turn, before the cancelled ones have had theirs
    assert fits.room.is_given != is_last
    await end(*tasks)
    assert (memory.num_waiting, holds.num_lost) == (0, 0)


@pytest.mark.asyncio
async def test_a_new_line_gives_those_that_have_room_their_time_again(clock):
    memory = queue_of(300)
    first, second = await given(memory, Message(memory, 100, Sharer("a")), Message(memory, 100, Sharer("b")))
    task = Message(memory, 150, Sharer("c")).begin()
    await turns()
    memory.leave(first.room)
    await task
    await clock.go_on(0.75)
    task = Message(memory, 200, Sharer("d")).begin()
    await turns()
    await clock.go_on(0.75)
    assert second.num_lost == 0
    await clock.go_on(0.5)
    assert second.num_lost == 1
    await end(task)


@pytest.mark.asyncio
async def test_rooms_of_which_nothing_came_are_lost_before_those_that_stand_still_and_none_that_goes_on(
    clock,
):
    memory = queue_of(2560)
    sharers = [Sharer(name) for name in "abcd"]
    messages = await given(memory, *(Message(memory, 640, sharer) for sharer in sharers))
    goes_on, stands_still, drips, _ = messages
    memory.hear(stands_still.room, 20)
    tasks = [Message(memory, 640, Sharer(name)).begin() for name in "efgh"]
    await turns()
    await clock.go_on(0.75)
    for _ in range(19):
        memory.hear(drips.room, 1)  # less than a part in 32
    memory.hear(goes_on.room, 20)
    assert [message.num_lost for message in messages] == [0, 0, 0, 0]
    await clock.go_on(0.5)
    await turns()
    assert [message.num_lost for message in messages] == [0, 1, 1, 1]
    assert [message.room.num_come for message in messages] == [20, 20, 19, 0]
    await end(*tasks)


@pytest.mark.asyncio
async def test_the_silent_are_lost_before_those_of_which_something_came(clock):
    memory = queue_of(2560)
    sharers = [Sharer(name) for name in "abcd"]
    messages = await given(memory, *(Message(memory, 640, sharer) for sharer in sharers))
    for message in messages[:3]:
        memory.hear(message.room, 640)
    task = Message(memory, 640, Sharer("e")).begin()
    await turns()
    await clock.go_on(2.0)
    await task
    assert [message.num_lost for message in messages] == [0, 0, 0, 1]


@pytest.mark.asyncio
async def test_no_room_is_lost_for_its_slowness_while_the_daemon_is_behind(clock):
    memory = queue_of(1920)
    messages = await given(memory, *(Message(memory, 640, Sharer(name)) for name in "abc"))
    memory.hear(messages[2].room, 640)
    messages[0].is_behind = messages[2].is_behind = True
    tasks = [Message(memory, 640, Sharer(name)).begin() for name in "de"]
    await turns()
    await clock.go_on(2.0)
    assert [message.num_lost for message in messages] == [0, 1, 0]
    messages[0].is_behind = False
    await clock.go_on(0.5)  # since it was found behind
    assert [message.num_lost for message in messages] == [0, 1, 0]
    await clock.go_on(1.0)
    await asyncio.gather(*tasks)
    assert [message.num_lost for message in messages] == [1, 1, 0]


@pytest.mark.parametrize("num_come", [100, 160], ids=["slow", "swift"])
def test_what_one_has_beyond_the_others_makes_way_for_them_unless_it_is_swift(num_come):
    pool, sharers = RoomPool(2048, 99), {}

    def room(name, num_bytes, *, now=None):
        made = Room(sharers.setdefault(name, Sharer(name)), num_bytes, lambda: None)
        pool.wait(made)
        if now is not None:
            assert pool.turn()[0] is made
            pool.give(made, now)
        return made

    greedy = room("greedy", 300, now=0.0), room("greedy", 300, now=0.0)
    for place in range(11):
        room(str(place), 127, now=0.0)
    newcomer, as_much = room("newcomer", 100), room("as much", 520)
    assert pool.turn()[0] is None
    for each, now in ((greedy[1], 2.0), (greedy[0], 2.5)):
        each.num_come = num_come
        pool.renew(each, now)
    assert pool.in_the_way(newcomer, 1.0) is None  # in the first second it may begin
    expected = greedy[1] if num_come == 100 else None  # of 150 after two more
    assert pool.in_the_way(newcomer, 3.0) is expected
    assert pool.in_the_way(as_much, 9.0) is None


@pytest.mark.asyncio
async def test_who_has_more_takes_no_room_of_who_has_less_however_slow_that_is(clock):
    """As when one fills all that it may have, and waits for more, beside another whose line is slow."""
    memory = queue_of(1000)
    greedy, line = Sharer("greedy"), Sharer("line")
    rooms = await given(memory, *(Message(memory, 100, greedy) for _ in range(3)))
    slow = await given(memory, *(Message(memory, 60, line) for _ in range(2)))
    task = Message(memory, 100, greedy).begin()
    await turns()
    await clock.go_on(4.9)
    assert not any(message.num_lost for message in (*rooms, *slow))
    await clock.go_on(0.2)  # a connection's own messages have longer
    await task
    assert [message.num_lost for message in (*rooms, *slow)] == [1, 0, 0, 0, 0]


@pytest.mark.asyncio
async def test_within_a_group_connections_make_way_for_each_other_too(clock):
    memory = queue_of(1000)
    greedy = await given(memory, *(Message(memory, 150, Sharer("a")) for _ in range(2)))
    greedy += await given(memory, Message(memory, 100, greedy[0].room.sharer))
    await given(memory, Message(memory, 90, Sharer("a")))
    waits = Message(memory, 60, Sharer("a"))
    task = waits.begin()
    await turns()
    assert not task.done()
    await clock.go_on(1.1)
    await task
    assert [message.num_lost for message in greedy] == [1, 0, 0]


@pytest.mark.asyncio
async def test_rooms_that_were_left_are_not_remembered():
    def num_parts():
        gc.collect()
        return sum(type(each) in (Group, Member) for each in gc.get_objects())

    memory, num_before = queue_of(400), num_parts()
    for place in range(1000):
        room = Message(memory, 5, Sharer(str(place))).room
        await memory.take(room)
        memory.leave(room)
    assert memory.num_bytes == 0
    assert num_parts() - num_before < 40  # a line keeps a few that have left it


@pytest.mark.parametrize("is_rich", [True, False], ids=["in the way", "overdue"])
@pytest.mark.asyncio
async def test_a_message_is_put_off_a_few_times_only(clock, is_rich):
    memory = queue_of(1000)
    (holds,) = await given(memory, Message(memory, 900 if is_rich else 500, Sharer("a")))
    holds.is_behind = True
    task = Message(memory, 200 if is_rich else 510, Sharer("c")).begin()
    await turns()
    for _ in range(MOST_PUT_OFF):
        await clock.go_on(1.1)
        assert holds.num_lost == 0
    while not task.done():
        await clock.go_on(1.1)
        await turns()
    assert (holds.num_lost, holds.room.was_slow) == (1, True)


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
async def test_what_came_by_and_by_gives_time_once_it_is_enough_and_nothing_after_its_room_was_left(clock):
    memory = queue_of(2**30)
    large, small, tiny = (Message(memory, num_bytes).room for num_bytes in (2**24, 640, 5))
    for room in (large, small, tiny):
        await memory.take(room)
    assert [room.least_bytes for room in (large, small, tiny)] == [16 * 1024, 20, 0]
    await clock.go_on(0.5)
    for _ in range(2):
        memory.hear(large, 8 * 1024)
        memory.hear(small, 9)
    memory.hear(tiny, 1)
    assert [room.due for room in (large, small, tiny)] == [1.5, 1.0, 1.5]
    for room in (large, small, tiny):
        memory.leave(room)
        memory.hear(room, 2**20)
    assert [room.num_come for room in (large, small, tiny)] == [16 * 1024, 18, 1]
    assert memory.num_bytes == 0


def test_who_made_others_wait_for_nothing_too_often_is_told_apart():
    incoming = Incoming(TransportLimits(control_frames_per_second=1e-9), RequestMemory(400, 10), Sharer("a"))
    for _ in range(SLOW_AT_ONCE):
        assert not incoming.are_too_slow
        incoming.count_slow()
    assert not incoming.are_too_slow
    incoming.count_slow()
    assert incoming.are_too_slow
