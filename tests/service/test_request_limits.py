"""What one request may hold, and all that come in together: refused before it is built, paused before it is taken."""

import asyncio
import weakref

import pytest
from google.protobuf.descriptor import Descriptor
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from h2.events import PingAckReceived
from smg_grpc_proto import vllm_engine_pb2 as gateway_pb

from pykv.errors import CapacityError, InvalidRequestError
from pykv.service import engine_service, health
from pykv.service.errors import RequestMemoryError
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.request_limits import LIST_LIMITS, PROMPT_IDS, request_bytes
from pykv.service.transport.request_memory import RequestMemory, Room
from pykv.service.wire_check import RequestCheck

GENERATE, CHAT = "/pykv.v1.Engine/Generate", "/pykv.v1.Engine/Chat"
GATEWAY = "/vllm.grpc.engine.VllmEngine/"
WATCH = "/grpc.health.v1.Health/Watch"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 3, 8


def ids_one_by_one(number):
    """A list of numbers as other libraries may send it: not packed."""
    inner = b"\x08\x01" * number
    return pb.GenerateRequest(token_ids=pb.TokenIds()).SerializeToString()[:1] + varint(len(inner)) + inner


def varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


def ours(**sampling):
    return pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**sampling)).SerializeToString()


def theirs(**sampling):
    sampling_params = gateway_pb.SamplingParams(**sampling)
    return gateway_pb.GenerateRequest(text="a", sampling_params=sampling_params).SerializeToString()


ABORT = gateway_pb.AbortRequest(request_ids=[""] * 3000).SerializeToString()
BIAS = dict.fromkeys(range(1025), 1.0)
THEIR_IDS = gateway_pb.TokenizedInput(input_ids=[1] * 200_000)

TOO_LONG = {
    "messages": (CHAT, b"\x12\x00" * 4097, "messages holds more than 4096 entries"),
    "stop": (GENERATE, ours(stop=[""] * 3000), "stop holds more than 16 entries"),
    "stop ids": (GENERATE, ours(stop_token_ids=[1] * 5000), "stop_token_ids holds more than 128 entries"),
    "bias": (GENERATE, ours(logit_bias=BIAS), "logit_bias holds more than 1024 entries"),
    "ids": (
        GENERATE,
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 200_000)).SerializeToString(),
        "prompt has",
    ),
    "their stop": (GATEWAY + "Generate", theirs(stop=[""] * 3000), "stop holds more than 16 entries"),
    "their stop ids": (
        GATEWAY + "Generate",
        theirs(stop_token_ids=[1] * 5000),
        "stop_token_ids holds more than 128",
    ),
    "their bias": (GATEWAY + "Generate", theirs(logit_bias=BIAS), "logit_bias holds more than 1024 entries"),
    "their ids": (
        GATEWAY + "Generate",
        gateway_pb.GenerateRequest(tokenized=THEIR_IDS).SerializeToString(),
        "prompt has",
    ),
    "aborted": (GATEWAY + "Abort", ABORT, "request_ids holds more than 1024 entries"),
    "unknown": (GENERATE, b"\xa0\x06\x01" * 40_000, "the request has more than 32768 fields"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "problem"), TOO_LONG.values(), ids=TOO_LONG)
async def test_a_list_that_is_too_long_is_refused_before_it_is_decoded(
    daemon, raw, framed, monkeypatch, path, body, problem
):
    monkeypatch.setattr(daemon.daemon._server._codec, "decode_checked", None)  # is not reached
    stream_id = await raw.send(path, framed(body))
    status, message = await raw.status(stream_id)
    assert status == INVALID_ARGUMENT
    assert problem in message


def test_every_limit_is_of_a_list_that_exists():
    for full_name in [*LIST_LIMITS, *PROMPT_IDS]:
        package = pb if full_name.startswith("pykv.") else gateway_pb
        message, field = full_name.split(".")[-2:]
        descriptor: Descriptor = package.DESCRIPTOR.message_types_by_name[message]
        assert descriptor.full_name + "." + field == full_name
        assert descriptor.fields_by_name[field].is_repeated


def test_the_check_counts_as_the_decoder_does():
    check = RequestCheck()
    check.max_model_len = 6000
    for ids in ([1] * 5999, [2**62] * 5999):
        check(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)).SerializeToString(),
            pb.GenerateRequest.DESCRIPTOR,
        )
        body = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[*ids, 1])).SerializeToString()
        with pytest.raises(
            CapacityError, match="prompt has 6000 tokens; allowed: fewer than the context cap"
        ):
            check(body, pb.GenerateRequest.DESCRIPTOR)
    body = ids_one_by_one(5999)
    assert len(pb.GenerateRequest.FromString(body).token_ids.ids) == 5999
    check(body, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(CapacityError, match="6000"):
        check(ids_one_by_one(6000), pb.GenerateRequest.DESCRIPTOR)
    largest = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a" * 100)] * 4096)
    check(largest.SerializeToString(), pb.ChatRequest.DESCRIPTOR)


@pytest.mark.parametrize("end", [b"\x80" * 11, b"\x0a\xff\xff\x03", b"\x0b\x0c", b"\x0d\x00"])
def test_bytes_that_are_no_message_do_not_pass_the_check(end):
    with pytest.raises(GRPCError, match="the bytes are no message"):
        RequestCheck()(ours(stop=["x" * 5000]) + end, pb.GenerateRequest.DESCRIPTOR)


def test_a_list_that_goes_on_in_a_second_part_is_counted_on():
    part = ours(stop_token_ids=[2**40] * 100, stop=["x" * 4096])
    RequestCheck()(part, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        RequestCheck()(part + part, pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.asyncio
async def test_a_call_of_a_few_names_may_send_as_little(raw, framed):
    assert request_bytes(GENERATE, 2**24) == 2**24
    assert request_bytes(GATEWAY + "Abort", 2**24) == 2**18
    for path in (WATCH, "/grpc.health.v1.Health/Check", "/pykv.v1.Engine/Abort", GATEWAY + "HealthCheck"):
        stream_id = await raw.send(path, framed(HealthCheckRequest(service="x" * 5000)))
        assert await raw.status(stream_id) == (RESOURCE_EXHAUSTED, "message of 5003 bytes; allowed: 4096")


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["MAX_WATCHERS", "MAX_WATCHERS_A_CONNECTION"])
async def test_watchers_of_health_are_bounded_and_leave_room(raw, framed, monkeypatch, limit, eventually):
    monkeypatch.setattr(health, limit, 2)
    watching = framed(HealthCheckRequest(service="nobody"))
    begun = [await raw.send(WATCH, watching) for _ in range(2)]
    assert [await raw.begun(stream_id) for stream_id in begun] == [(0, "")] * 2
    status, message = await raw.status(await raw.send(WATCH, watching))
    assert (status, message.startswith("2 watchers of health")) == (RESOURCE_EXHAUSTED, True)
    raw.h2.reset_stream(begun[0])
    await raw.flush()

    async def has_room():
        return await raw.begun(await raw.send(WATCH, watching)) == (0, "")

    await eventually(has_room)


class Held:
    """A message that can be watched."""

    def __init__(self, message):
        self._message = message

    def __getattr__(self, name):
        return getattr(self._message, name)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_a_request_that_waits_does_not_keep_its_message(raw, framed, engine, monkeypatch, method):
    received, receive = [], engine_service.receive

    async def remember(stream):
        message = Held(await receive(stream))
        received.append(weakref.ref(message))
        return message

    monkeypatch.setattr(engine_service, "receive", remember)
    engine.hold()
    asked = (
        pb.GenerateRequest(text="a b")
        if method == "Generate"
        else pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a b")])
    )
    await raw.send(f"/pykv.v1.Engine/{method}", framed(asked))
    await engine.until(lambda: engine.live)
    await asyncio.sleep(0)
    assert [message() for message in received] == [None]


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
        return memory.num_waiting_bytes == 65_535

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
    assert (memory.num_bytes, memory.num_waiting_bytes) == (200_000, 0)
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
    assert (status, "others wait for its room" in message) == (RESOURCE_EXHAUSTED, True)
    assert (await second.status(goes_on))[0] == INVALID_ARGUMENT  # it was read
    for connection in (first, second):
        await connection.close()


@pytest.mark.asyncio
async def test_of_those_that_wait_the_smallest_is_next_and_too_many_are_refused():
    memory, hurried = RequestMemory(400, 60), []
    holds = Room(300, hurried.append)
    await memory.take(holds)
    rooms = [Room(size, hurried.append) for size in (250, 200, 220)]
    tasks = [asyncio.create_task(memory.take(room)) for room in rooms]
    await asyncio.sleep(0)
    assert len(hurried) == 1
    with pytest.raises(RequestMemoryError):
        await tasks[0]  # the largest, since three may have sent 180 bytes of 100
    with pytest.raises(RequestMemoryError):
        await tasks[2]
    await memory.take(Room(50, hurried.append))
    memory.leave(holds)
    await tasks[1]
    assert (memory.num_bytes, memory.num_waiting_bytes) == (250, 0)
    cancelled = asyncio.create_task(memory.take(Room(260, hurried.append)))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    memory.leave(rooms[1])
    assert (memory.num_bytes, memory.num_waiting_bytes) == (50, 0)


@pytest.mark.asyncio
async def test_room_that_a_cancelled_call_waited_for_goes_to_the_next():
    memory, hurried = RequestMemory(400, 50), []
    holds = Room(300, hurried.append)
    await memory.take(holds)
    cancelled, waits = [asyncio.create_task(memory.take(Room(size, hurried.append))) for size in (250, 260)]
    await asyncio.sleep(0)
    cancelled.cancel()
    memory.leave(holds)  # before the cancelled one has had its turn
    await waits
    await asyncio.gather(cancelled, return_exceptions=True)
    assert cancelled.cancelled()
    assert (memory.num_bytes, memory.num_waiting_bytes) == (260, 0)


@pytest.mark.asyncio
async def test_those_that_wait_leave_the_connections_window_to_others(
    start_daemon, raw_open, framed, eventually
):
    daemon = await start_daemon(request_memory=16 * 2**20)
    memory = daemon.daemon._server._memory
    await memory.take(Room(12 * 2**20, lambda seconds: None))
    raw = await raw_open(daemon.address)
    waiting = [raw.request(GENERATE, framed(b"", length=300_000), end_stream=False) for _ in range(60)]
    await raw.flush()

    async def all_wait():
        return memory.num_waiting_bytes == len(waiting) * 65_535

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
