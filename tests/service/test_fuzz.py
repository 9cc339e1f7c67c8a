"""Whatever is sent, the call ends with a status, and the daemon serves the next one."""

import asyncio
from contextlib import suppress

import h2.exceptions
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pykv.client import Client
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

METHODS = {
    "Generate": pb.GenerateRequest,
    "Chat": pb.ChatRequest,
    "Abort": pb.AbortRequest,
    "EndSession": pb.EndSessionRequest,
    "GetModel": pb.GetModelRequest,
    "GetStats": pb.GetStatsRequest,
    "SubscribeKvEvents": pb.SubscribeKvEventsRequest,
}
ENDLESS = {"SubscribeKvEvents"}
SHORT = pb.SamplingParams(max_tokens=3)
GOOD = {
    "Generate": pb.GenerateRequest(text="a", sampling=SHORT),
    "Chat": pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")], sampling=SHORT),
}
STATUSES = {0, 3, 5, 6, 8, 12, 13}  # never UNKNOWN, which nobody would have meant
INTERNAL = 13
SECONDS_A_CALL = 20.0
FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

integers = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63)]))
naturals = integers.map(abs)
texts = st.one_of(st.text(max_size=20), st.sampled_from(["a", "<|end|>", "\0", "é" * 300, "🙂👨‍👩‍👧"]))
SCALARS = {
    Field.TYPE_INT64: integers.filter(lambda value: value < 2**63),
    Field.TYPE_INT32: integers.filter(lambda value: -(2**31) <= value < 2**31),
    Field.TYPE_UINT64: naturals,
    Field.TYPE_UINT32: naturals.filter(lambda value: value < 2**32),
    Field.TYPE_DOUBLE: st.one_of(st.floats(), st.floats(0, 2)),
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_STRING: texts,
    Field.TYPE_BYTES: st.binary(max_size=300),
}


def messages(descriptor):
    """Messages of this kind with any fields set to any values."""
    return st.fixed_dictionaries({}, optional={field.name: values(field) for field in descriptor.fields}).map(
        lambda fields: made(descriptor, fields)
    )


def made(descriptor, fields):
    message = GetMessageClass(descriptor)()
    for name, value in fields.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key, entry in value.items():
                getattr(message, name)[key] = entry
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def values(field):
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        return st.dictionaries(SCALARS[key.type], SCALARS[value.type], max_size=4)
    one = messages(kind) if kind is not None else SCALARS[field.type]
    if field.name == "role":
        one = st.one_of(st.sampled_from(["user", "assistant", "system"]), texts)
    return st.lists(one, max_size=6) if field.is_repeated else one


def bounded(request):
    """The same request, with no more work than a test has time for."""
    sampling = getattr(request, "sampling", None)
    if sampling is not None:
        if not sampling.HasField("max_tokens") or 40 < sampling.max_tokens < 2**31:
            sampling.max_tokens = 5
        if 4 < sampling.n <= 128:
            sampling.n = 4
    return request


@pytest.fixture
def fuzzed(start_daemon_in, make_real_engine):
    """A daemon in an event loop of its own, and `call(method, data)` that gives the status of one call."""
    with asyncio.Runner() as runner:
        options = {"max_kv_events": 1000}
        daemon, stop = runner.run(start_daemon_in(make_real_engine(**options), **options))
        yield Fuzzed(runner, daemon)
        runner.run(stop())


class Fuzzed:
    def __init__(self, runner, daemon):
        self.runner, self.daemon = runner, daemon

    def run(self, coroutine):
        async def bounded_in_time():
            async with asyncio.timeout(SECONDS_A_CALL):
                return await coroutine

        return self.runner.run(bounded_in_time())

    def status(self, open_raw, framed, method, data):
        async def call():
            connection = await open_raw(self.daemon.address)
            try:
                stream_id = await connection.send(f"/pykv.v1.Engine/{method}", data)
                ends = method not in ENDLESS
                return await (connection.status(stream_id) if ends else connection.begun(stream_id))
            finally:
                await connection.close()

        return self.run(call())

    def still_serves(self):
        async def ask():
            async with Client(self.daemon.address) as client:
                params = SamplingParams(max_tokens=2, ignore_eos=True)
                deltas = [delta async for delta in client.generate("a", params)]
                return deltas[-1].usage.output_tokens, await client.health()

        async def have_ended():
            while len(self.daemon.daemon._calls):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        assert self.run(ask()) == (2, "SERVING")
        self.run(have_ended())


@pytest.mark.parametrize("method", METHODS)
def test_any_fields_get_a_status(fuzzed, raw_open, framed, method):
    seen = set()

    @FUZZ
    @example(GOOD.get(method, METHODS[method]()))
    @given(messages(METHODS[method].DESCRIPTOR).map(bounded))
    def check(request):
        code, text = fuzzed.status(raw_open, framed, method, framed(request))
        assert code in STATUSES - {INTERNAL}, (code, text)
        assert len(text) <= 400
        seen.add(code)

    check()
    assert seen >= {0, 3} if method in ("Generate", "Chat") else 0 in seen  # it did reach what it should
    fuzzed.still_serves()


def test_any_bytes_as_a_message_get_a_status(fuzzed, raw_open, framed):
    @FUZZ
    @given(st.sampled_from(sorted(METHODS)), st.binary(max_size=200), st.booleans(), st.integers(-3, 3))
    def check(method, data, is_compressed, lie):
        length = max(len(data) + lie, 0)
        framed_data = framed(data, is_compressed=is_compressed, length=length)
        code, _ = fuzzed.status(raw_open, framed, method, framed_data)
        assert code in STATUSES - {INTERNAL}

    check()
    fuzzed.still_serves()


def test_any_bytes_on_the_socket_end_the_connection_at_most(fuzzed):
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    kinds = st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40))
    frames = st.lists(kinds.map(frame), max_size=6).map(b"".join)

    @FUZZ
    @given(st.one_of(st.binary(max_size=300), frames.map(lambda data: preface + data)))
    def check(data):
        fuzzed.run(send(fuzzed.daemon.address, data))

    check()
    fuzzed.still_serves()


def frame(parts):
    kind, flags, stream_id, payload = parts
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream_id.to_bytes(4) + payload


async def send(address, data):
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    writer.write(data)
    with suppress(ConnectionError):
        writer.write_eof()
        while await reader.read(65536):
            pass
    writer.close()
    with suppress(ConnectionError, h2.exceptions.ProtocolError):
        await writer.wait_closed()
