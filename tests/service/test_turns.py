"""Floods of calls: the turns of the loop are shared, and who only makes calls that nobody serves is sent away."""

import asyncio
from collections import deque

import h2.errors
import h2.events
import pytest
from hyperframe.frame import PingFrame

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.service.transport import Offence, TransportLimits, turns
from pykv.service.transport.backlog import HEADER_BYTES, PIECE_BYTES, PIECE_CALLS, PREFACE_BYTES, Backlog
from pykv.service.transport.frame_meter import FrameMeter
from pykv.service.transport.refusals import Refusals
from pykv.service.transport.turns import Turns

CALM = h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
UNKNOWN = "/no.such/Method"


def frame(kind, payload=b"", flags=4):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + b"\0\0\0\1" + payload


def pieces_of(backlog):
    pieces = []
    while backlog.has_piece:
        pieces.append(backlog.take())
    return pieces


def test_a_piece_is_bounded_in_bytes_and_in_calls():
    sent = b"P" * PREFACE_BYTES + frame(1, b"abc") * 20 + frame(0, b"d" * 10_000) + frame(1, b"e" * 5000) * 2
    backlog = Backlog()
    backlog.append(sent)
    pieces = pieces_of(backlog)
    assert b"".join(pieces) == sent
    assert max(map(len, pieces)) == PIECE_BYTES
    assert len(pieces[0]) == PREFACE_BYTES + PIECE_CALLS * len(frame(1, b"abc"))


@pytest.mark.parametrize("size", [1, 5, 9, 1000])
def test_no_header_of_a_frame_is_cut_however_the_bytes_come(size):
    sent = b"P" * PREFACE_BYTES + (frame(1, b"abc") + frame(0, b"d" * 30)) * 9
    backlog, pieces = Backlog(), []
    for place in range(0, len(sent), size):
        backlog.append(sent[place : place + size])
        pieces += pieces_of(backlog)
    assert b"".join(pieces) == sent
    beginnings, place = set(), PREFACE_BYTES
    while place < len(sent):
        beginnings.add(place)
        place += HEADER_BYTES + int.from_bytes(sent[place : place + 3], "big")
    ends = [sum(map(len, pieces[:count])) for count in range(1, len(pieces))]
    assert not [end for end in ends for start in beginnings if start < end < start + HEADER_BYTES]


class FakeFeeder:
    """A connection whose pieces each begin some calls, and that remembers in which turn they were handled."""

    def __init__(self, calls, turn, seconds=0.0):
        self.calls, self.turn, self.seconds, self.fed = deque(calls), turn, seconds, []

    @property
    def has_more(self):
        return bool(self.calls)

    def feed(self):
        self.fed.append(self.turn[0])
        self.turn[1] += self.seconds
        return self.calls.popleft()


@pytest.fixture
def turn(monkeypatch):
    """The number of the loop's turn, and the time, which only what is fed lets pass."""
    now = [0, 0.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[1])
    return now


async def pass_turns(turn, count):
    for _ in range(count):
        await asyncio.sleep(0)
        turn[0] += 1


@pytest.mark.asyncio
async def test_all_connections_share_the_calls_and_the_seconds_of_a_turn(turn):
    shared = Turns()
    floods = [FakeFeeder([turns.TURN_CALLS // 2] * 10, turn) for _ in range(3)]
    slow = FakeFeeder([0] * 4, turn, seconds=turns.TURN_SECONDS)
    for feeder in (*floods, slow):
        shared.add(feeder)
    await pass_turns(turn, 40)
    fed = [number for feeder in floods for number in feeder.fed]
    assert (len(fed), len(slow.fed)) == (30, 4)
    later = [number for number in fed if number > 0]  # the first number stands for two turns
    assert max(map(later.count, later)) <= 2
    assert max(slow.fed.count(number) for number in slow.fed if number > 0) == 1


@pytest.mark.asyncio
async def test_who_has_not_waited_comes_before_floods_which_go_on(turn):
    shared = Turns()
    floods = [FakeFeeder([turns.TURN_CALLS] * 100, turn) for _ in range(50)]
    for feeder in floods:
        shared.add(feeder)
    await pass_turns(turn, 150)
    polite = FakeFeeder([1], turn)
    shared.add(polite)
    came = turn[0]
    await pass_turns(turn, 6)
    assert polite.fed
    assert polite.fed[0] - came <= 4
    for _ in range(100):
        shared.add(FakeFeeder([turns.TURN_CALLS], turn))
    before = sum(len(feeder.fed) for feeder in floods)
    await pass_turns(turn, 40)
    assert sum(len(feeder.fed) for feeder in floods) - before >= 20 // turns.WAITED_ONE_OF - 1


@pytest.mark.asyncio
async def test_a_connection_alone_is_handled_at_once(turn):
    feeder = FakeFeeder([1] * turns.TURN_CALLS, turn)
    Turns().add(feeder)
    assert feeder.fed == [0] * turns.TURN_CALLS


async def sent_away(connection):
    event = await connection.wait_for(h2.events.ConnectionTerminated)
    return event.error_code, event.additional_data.decode()


@pytest.mark.asyncio
async def test_a_flood_of_unknown_calls_is_sent_away_and_begins_no_task(start_daemon, raw_open, monkeypatch):
    daemon = await start_daemon(control_frames_burst=100, control_frames_per_second=1.0)
    connection = await raw_open(daemon.address)
    (protocol,) = daemon.daemon._server._connections
    monkeypatch.setattr(protocol.handler, "accept", None)
    for _ in range(150):
        connection.request(UNKNOWN)
    await connection.flush()
    assert await sent_away(connection) == (CALM, Offence.REFUSED_CALLS.value)
    async with Client(daemon.address) as client:
        assert await client.health() == "SERVING"
    assert daemon.daemon._server.num_closed[Offence.REFUSED_CALLS] == 1
    await connection.close()


@pytest.mark.asyncio
async def test_floods_of_many_connections_leave_room_for_others(start_daemon, raw_open):
    daemon = await start_daemon(control_frames_burst=10**6)
    connections = [await raw_open(daemon.address) for _ in range(8)]
    async with Client(daemon.address) as client:
        await client.health()
        for connection in connections:
            for _ in range(3000):
                connection.request(UNKNOWN)
            connection.writer.write(connection.h2.data_to_send())
        params = SamplingParams(max_tokens=1)
        assert [delta async for delta in client.generate([5], params)]
        waiting = [protocol for protocol in daemon.daemon._server._connections if protocol.has_more]
        assert waiting  # the call was served amid the floods
    for connection in connections:
        connection.abort()


def test_refusals_have_an_allowance_that_time_and_good_calls_fill():
    now = [0.0]
    refusals = Refusals(
        TransportLimits(control_frames_burst=3, control_frames_per_second=2.0), lambda: now[0]
    )
    for status in ("12", "16", "12", "3", "8"):
        refusals.heed(status)
    assert not refusals.are_too_many
    refusals.heed("0")
    refusals.count()
    assert not refusals.are_too_many
    refusals.count()
    assert refusals.are_too_many
    now[0] = 1.0
    refusals.count()
    assert not refusals.are_too_many


PADDED = 8


@pytest.mark.parametrize(
    ("sent", "cost"),
    [
        (frame(0, b"\xff" + bytes(255), PADDED), 1.0),
        (frame(0, b"\xff" + b"d" + bytes(255), PADDED), 0.1),
        (frame(0, b"\x01" + bytes(256) + b"\0", PADDED), 0.0),
        (frame(0, b"\xff" + bytes(10), PADDED), 1.0),  # more than all of it: no data
        (frame(0, b"", PADDED), 1.0),
        (frame(4, bytes(6 * 16), 0), 1.0),
        (frame(4, bytes(6 * 2730), 0), 1.0 + (2730 - 16) * 0.01),
    ],
)
@pytest.mark.parametrize("size", [1, 10, 10**6])
def test_padding_costs_as_no_data_and_settings_by_their_number(sent, cost, size):
    meter = FrameMeter(TransportLimits(control_frames_burst=1000), lambda: 0.0)
    meter.read(b"P" * 24)
    for place in range(0, len(sent), size):
        meter.read(sent[place : place + size])
    meter.read(frame(0, b"", 1))
    assert meter._allowance._level == pytest.approx(1000 - cost)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_begun", [True, False], ids=["a call", "a call that is over"])
async def test_a_flood_of_padding_is_sent_away(start_daemon, raw_open, has_begun):
    daemon = await start_daemon(control_frames_burst=50, control_frames_per_second=1.0)
    connection = await raw_open(daemon.address)
    connection.request("/pykv.v1.Engine/Generate" if has_begun else UNKNOWN, end_stream=False)
    await connection.flush()
    connection.writer.write(frame(0, b"\xff" + bytes(255), PADDED) * 100)
    assert await sent_away(connection) == (CALM, Offence.CONTROL_FRAMES.value)
    await connection.close()


@pytest.mark.asyncio
async def test_who_never_shows_a_good_credential_is_sent_away(start_daemon, raw_open, framed, tmp_path):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[tenants.a]\ntoken_sha256 = ["{"0" * 64}"]\n')
    options = {"control_frames_burst": 20, "control_frames_per_second": 1.0, "tenants": str(tenants)}
    connection = await raw_open((await start_daemon(**options)).address)
    calls = [connection.request("/pykv.v1.Engine/GetModel", framed(b"")) for _ in range(30)]
    await connection.flush()
    assert (await connection.status(calls[20]))[0] == 16  # the first beyond the allowance
    connection.writer.write(PingFrame(0).serialize())  # with which the daemon looks again
    assert await sent_away(connection) == (CALM, Offence.REFUSED_CALLS.value)
    await connection.close()
