"""An answer is what the headers that end it say, and whole: nothing that a server says ends in another error."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from grpclib.health.v1.health_pb2 import HealthCheckResponse

from pykv.client import Client, ServiceError
from pykv.errors import InvalidRequestError, PykvError, QueueFullError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE, MODEL, STATS = (f"/pykv.v1.Engine/{name}" for name in ("Generate", "GetModel", "GetStats"))
HEALTH = "/grpc.health.v1.Health/Check"
BEGIN = [(":status", "200"), ("content-type", "application/grpc")]
STOP = pb.FINISH_REASON_STOP


def framed(message):
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def delta(index=0, finish_reason=0):
    return pb.GenerateResponse(deltas=[pb.Delta(index=index, token_ids=[5], finish_reason=finish_reason)])


def answering(*messages, early=(), trailers=None):
    """An answer of these messages between headers and, if any, trailers."""

    def answer(connection, stream_id):
        connection.send_headers(stream_id, [*BEGIN, *early])
        connection.send_data(stream_id, b"".join(map(framed, messages)))
        if trailers is not None:
            connection.send_headers(stream_id, trailers, end_stream=True)

    return answer


def refusing(*trailers):
    """An answer of trailers alone."""
    return lambda connection, stream_id: connection.send_headers(
        stream_id, [*BEGIN, *trailers], end_stream=True
    )


async def generate(client, **params):
    return [delta async for delta in client.generate([5], SamplingParams(**params))]


CALLS = {
    GENERATE: (generate, delta(finish_reason=STOP)),
    MODEL: (Client.get_model, pb.GetModelResponse(name="a")),
    STATS: (Client.get_stats, pb.GetStatsResponse()),
    HEALTH: (Client.health, HealthCheckResponse(status=1)),
}


@asynccontextmanager
async def connected(scripted, path, answer):
    server = scripted({path: answer})
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        yield client, server


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("hint", "seconds"),
    [
        ("250", 0.25),
        ("99999999", 99_999.999),
        ("9" * 9, None),
        ("9" * 400, None),
        ("9" * 5000, None),
        ("1e3", None),
        ("-5", None),
        ("\u0663", None),
        ("", None),
    ],
)
@pytest.mark.parametrize(("name", "kind"), [("", ServiceError), ("QueueFullError", QueueFullError)])
async def test_a_hint_to_come_back_is_a_time_that_can_be_waited_for_or_none(
    scripted, path, hint, seconds, name, kind
):
    trailers = ("grpc-status", "8"), ("pykv-error", name), ("retry-after-ms", hint)
    call, _ = CALLS[path]
    async with connected(scripted, path, refusing(*trailers)) as (client, _):
        with pytest.raises(kind) as failure:
            await call(client)
    assert failure.value.retry_seconds == seconds


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "status", ["+0", "-0", "0_0", "00", "\u0660", "", "²", "17", "-1", "9" * 5000, "0 0", "0x0", "OK"]
)
@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_status_that_is_no_number_of_grpc_is_no_success(scripted, path, status, is_alone):
    call, message = CALLS[path]
    trailers = ("grpc-status", status)
    answer = refusing(trailers) if is_alone else answering(message, trailers=[trailers])
    async with connected(scripted, path, answer) as (client, _):
        with pytest.raises(ServiceError, match=r"^UNKNOWN: the server sent the grpc-status '") as failure:
            await call(client)
    assert len(str(failure.value)) < 200


@pytest.mark.parametrize("statuses", [("0", "3"), ("3", "0"), ("0", "0")])
async def test_of_two_statuses_none_is_believed(scripted, statuses):
    trailers = [("grpc-status", status) for status in statuses]
    answer = answering(delta(finish_reason=STOP), trailers=trailers)
    async with connected(scripted, GENERATE, answer) as (client, _):
        with pytest.raises(ServiceError, match=f"^UNKNOWN: .*'{', '.join(statuses)}': allowed is a number"):
            await generate(client)


async def test_what_a_server_says_of_a_failure_is_short_and_obeyed_by_no_terminal(scripted):
    said = "%1B[2J%00%FF%zz%" + "a" * 5000
    async with connected(scripted, MODEL, refusing(("grpc-status", "3"), ("grpc-message", said))) as (
        client,
        _,
    ):
        with pytest.raises(ServiceError) as failure:
            await client.get_model()
    text = str(failure.value)
    assert text.startswith("INVALID_ARGUMENT: ?[2J?")
    assert text.isprintable()
    assert len(text) < 1100


@pytest.mark.parametrize(
    ("named", "field"), [("top_p", "top_p"), ("a b", None), ("\x7f", None), ("a" * 65, None), ("é", None)]
)
async def test_a_field_that_a_server_names_is_a_name(scripted, named, field):
    trailers = ("grpc-status", "3"), ("pykv-error", "InvalidRequestError"), ("pykv-field", named)
    async with connected(scripted, GENERATE, refusing(*trailers)) as (client, _):
        with pytest.raises(InvalidRequestError) as failure:
            await generate(client)
    assert failure.value.field == field


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    ("early", "trailers", "status"),
    [
        ("0", "14", "UNAVAILABLE"),
        ("0", "13", "INTERNAL"),
        ("0", None, "UNKNOWN"),
        (None, None, "UNKNOWN"),
    ],
)
async def test_the_status_is_what_the_headers_that_end_the_answer_say(
    scripted, path, early, trailers, status
):
    call, message = CALLS[path]

    def answer(connection, stream_id):
        ends = None if trailers is None else [("grpc-status", trailers)]
        answering(message, early=[] if early is None else [("grpc-status", early)], trailers=ends)(
            connection, stream_id
        )
        if ends is None:
            connection.end_stream(stream_id)

    async with connected(scripted, path, answer) as (client, _):
        with pytest.raises(ServiceError) as failure:
            await call(client)
    assert failure.value.status == status


@pytest.mark.parametrize("path", CALLS)
async def test_a_status_before_the_end_is_not_read(scripted, path):
    call, message = CALLS[path]
    early = ("grpc-status", "13"), ("pykv-error", "EngineDeadError"), ("grpc-message", "no")
    answer = answering(message, early=early, trailers=[("grpc-status", "0")])
    async with connected(scripted, path, answer) as (client, _):
        await call(client)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("early", [[], [("grpc-status", "0")]])
@pytest.mark.parametrize("ends", [True, False])
async def test_an_answer_whose_connection_ends_before_its_status_is_none(scripted, path, early, ends):
    call, message = CALLS[path]

    def answer(connection, stream_id):
        answering(message, early=early)(connection, stream_id)
        if ends:
            connection.end_stream(stream_id)
        server.calls[path][1].write(connection.data_to_send())
        server.calls[path][1].close()

    async with connected(scripted, path, answer) as (client, server):
        with pytest.raises(
            ServiceError, match=r"^(UNAVAILABLE: Connection lost|UNKNOWN: .*without a status)$"
        ):
            await call(client)


WHOLE = [delta(index, STOP) for index in range(3)]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "0, 1, 2"),
        ([delta()], "0, 1, 2"),
        ([*WHOLE[:2], delta(2)], "2"),
        ([WHOLE[2]], "0, 1"),
        ([pb.GenerateResponse(request_id="a")], "0, 1, 2"),
    ],
)
async def test_an_answer_is_whole_once_all_samples_have_ended(scripted, messages, words):
    answer = answering(*messages, trailers=[("grpc-status", "0")])
    async with connected(scripted, GENERATE, answer) as (client, server):
        server.answers[GENERATE] = answering(*WHOLE, trailers=[("grpc-status", "0")])
        assert len(await generate(client, n=3)) == 3
        server.answers[GENERATE] = answer
        with pytest.raises(
            ServiceError, match=f"^INTERNAL: .*without a finish reason of the samples {words}$"
        ):
            await generate(client, n=3)


async def test_many_samples_without_an_end_are_counted_not_listed(scripted):
    answer = answering(trailers=[("grpc-status", "0")])
    async with connected(scripted, GENERATE, answer) as (client, _):
        with pytest.raises(ServiceError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
            await generate(client, n=64)


async def test_a_failure_is_told_before_what_is_missing(scripted):
    trailers = [("grpc-status", "14"), ("pykv-error", "EngineDeadError")]
    async with connected(scripted, GENERATE, answering(delta(), trailers=trailers)) as (client, _):
        with pytest.raises(PykvError) as failure:
            await generate(client)
    assert type(failure.value).__name__ == "EngineDeadError"


BAD_VALUES = {
    "a sample that was not asked for": (GENERATE, delta(index=1), "index 1: allowed is below n, 1$"),
    "a finish reason that nobody knows": (GENERATE, delta(finish_reason=99), "finish reason 99: .*stop"),
    "a health that nobody knows": (HEALTH, HealthCheckResponse(status=99), "health 99: .*SERVING"),
    "a histogram that is none": (
        STATS,
        pb.GetStatsResponse(queue_time=pb.Histogram(bounds=[1], counts=[1])),
        "1 bounds and 1 counts",
    ),
}


@pytest.mark.parametrize(("path", "message", "words"), BAD_VALUES.values(), ids=BAD_VALUES)
async def test_a_value_that_cannot_be_is_refused(scripted, path, message, words):
    async with connected(scripted, path, answering(message, trailers=[("grpc-status", "0")])) as (client, _):
        with pytest.raises(ServiceError, match=f"^INTERNAL: the server sent .*{words}"):
            await CALLS[path][0](client)


@pytest.mark.parametrize("path", [MODEL, STATS, HEALTH])
@pytest.mark.parametrize(("num_replies", "words"), [(0, "no reply"), (2, "more than one reply")])
async def test_where_one_reply_is_due_there_is_one(scripted, path, num_replies, words):
    call, message = CALLS[path]
    answer = answering(*[message] * num_replies, trailers=[("grpc-status", "0")])
    async with connected(scripted, path, answer) as (client, _):
        with pytest.raises(ServiceError, match=f"^INTERNAL: the server sent {words}: allowed is one$"):
            await call(client)
