"""What one request may hold: refused before it is built."""

import asyncio
import re
import weakref
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from smg_grpc_proto import vllm_engine_pb2 as gateway_pb

from pykv.errors import CapacityError, InvalidRequestError
from pykv.service import engine_service, health, wire_check
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.request_limits import LIST_LIMITS, PROMPT_IDS, method_limits
from pykv.service.transport import Offence
from pykv.service.transport.codec import StrictCodec
from pykv.service.wire_check import RequestCheck

OPERATE = Path(__file__).resolve().parents[2] / "docs" / "operate.md"
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
    "unknown": (GENERATE, b"\xa0\x06\x01" * 3000, "one part has more than 128 fields beside its lists"),
    "known": (GENERATE, b"\x0a\x00" * 3000, "one part has more than 128 fields beside its lists"),
    "unknown in messages": (
        CHAT,
        (b"\x12\x0a" + b"\x78\x00" * 5) * 4096,
        "it has more than 20480 fields, a packed list being one",
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "problem"), TOO_LONG.values(), ids=TOO_LONG)
async def test_a_list_that_is_too_long_is_refused_before_it_is_decoded(
    raw, framed, monkeypatch, path, body, problem
):
    monkeypatch.setattr(StrictCodec, "decode_checked", None)  # is not reached
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
            CapacityError, match="prompt has 6000 tokens: allowed is fewer than the context cap"
        ):
            check(body, pb.GenerateRequest.DESCRIPTOR)
    body = ids_one_by_one(5999)
    assert len(pb.GenerateRequest.FromString(body).token_ids.ids) == 5999
    check(body, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(CapacityError, match="6000"):
        check(ids_one_by_one(6000), pb.GenerateRequest.DESCRIPTOR)
    largest = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a" * 100)] * 4096)
    check(largest.SerializeToString(), pb.ChatRequest.DESCRIPTOR)


def test_what_a_newer_client_may_add_passes_the_check():
    """The longest conversation, with a field that is not known here in each message, and all else that may be long."""
    message = pb.ChatMessage(role="user", content="a").SerializeToString() + b"\x78\x00"
    others = pb.ChatRequest(
        sampling=pb.SamplingParams(
            stop=["a"] * 16, stop_token_ids=[1] * 128, logit_bias=dict.fromkeys(range(1024), 1.0)
        )
    )
    body = (b"\x12" + varint(len(message)) + message) * 4096 + others.SerializeToString() + b"\x78\x00" * 100
    RequestCheck()(body, pb.ChatRequest.DESCRIPTOR)


def test_of_a_message_with_too_many_fields_few_are_walked_over(monkeypatch):
    """The walk holds up the event loop."""
    looked_up = []

    class Fields(dict):
        def get(self, number):
            looked_up.append(number)

    monkeypatch.setattr(wire_check, "_fields_of", lambda descriptor: Fields())
    for field in (b"\x78\x00", b"\x7a\x00", b"\x7d\0\0\0\0", b"\xa0\x06\x81\x01"):
        with pytest.raises(GRPCError, match="more than 128 fields"):
            RequestCheck()(field * 32_000, pb.GenerateRequest.DESCRIPTOR)
    assert 0 < len(looked_up) <= 4 * 129


def test_the_page_for_operators_has_the_bounds_of_fields():
    text = " ".join(OPERATE.read_text().split())
    found = re.search(r"([\d,]+) fields, a packed list of numbers being one.*?([\d,]+) fields, unknown", text)
    told = [int(number.replace(",", "")) for number in found.groups()]
    assert told == [wire_check.FIELDS_LIMIT, wire_check.SINGLE_FIELDS_LIMIT]
    assert wire_check.UNCHECKED_BYTES == 4096
    assert "larger than 4 KiB" in text


@pytest.mark.asyncio
async def test_fields_are_counted_in_what_is_larger_than_4_kib(raw, framed):
    small = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(max_tokens=1))
    unknown = b"\x78\x00"  # two bytes
    most = (4096 - small.ByteSize()) // 2
    for count, status in ((most, 0), (most + 1, INVALID_ARGUMENT)):
        stream_id = await raw.send(GENERATE, framed(small.SerializeToString() + unknown * count))
        assert (await raw.status(stream_id))[0] == status


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b"\x78\x00" * 3000, b"\xff" * 100], ids=["too many fields", "no message"])
async def test_who_only_sends_what_is_no_message_is_sent_away(start_daemon, raw_open, framed, body):
    daemon = await start_daemon(control_frames_burst=4, control_frames_per_second=0.001)
    raw = await raw_open(daemon.address)
    statuses = []

    async def send():
        statuses.append((await raw.status(await raw.send(GENERATE, framed(body))))[0])

    for _ in range(5 if len(body) < 4096 else 3):  # the longer one counts twice
        await send()
    with pytest.raises(ConnectionError):
        await send()
    assert statuses == [INVALID_ARGUMENT] * len(statuses)
    assert daemon.daemon._server.num_closed == {Offence.REFUSED_CALLS: 1}
    await raw.close()


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
    assert method_limits(GENERATE, 2**24) == (2**24, True)
    assert method_limits(GATEWAY + "Abort", 2**24) == (2**18, False)
    for path in (WATCH, "/grpc.health.v1.Health/Check", "/pykv.v1.Engine/Abort", GATEWAY + "HealthCheck"):
        stream_id = await raw.send(path, framed(HealthCheckRequest(service="x" * 5000)))
        assert await raw.status(stream_id) == (RESOURCE_EXHAUSTED, "message of 5003 bytes: allowed is 4096")


@pytest.mark.asyncio
async def test_watchers_of_health_are_bounded_and_leave_room(
    start_daemon, raw_open, framed, monkeypatch, eventually
):
    monkeypatch.setattr(health, "MAX_WATCHERS_A_CONNECTION", 2)
    monkeypatch.setattr(health, "MAX_WATCHERS", 9)
    daemon = await start_daemon()
    watching = framed(HealthCheckRequest(service="nobody"))

    async def watch(connection):
        stream_id = await connection.send(WATCH, watching)
        return stream_id, (await connection.begun(stream_id))[0]

    connections = [await raw_open(daemon.address) for _ in range(7)]
    first, last = connections[0], connections[-1]
    begun, _ = await watch(first)
    assert [(await watch(first))[1] for _ in range(2)] == [0, RESOURCE_EXHAUSTED]
    for connection in connections[1:5]:
        assert [(await watch(connection))[1] for _ in range(2)] == [0, 0]
    for connection in connections[5:]:  # no more is left to their peer than it has; but one is each one's own
        assert [(await watch(connection))[1] for _ in range(2)] == [0, RESOURCE_EXHAUSTED]
    first.h2.reset_stream(begun)
    await first.flush()

    async def has_room():
        return (await watch(last))[1] == 0

    await eventually(has_room)
    for connection in connections:
        await connection.close()


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
