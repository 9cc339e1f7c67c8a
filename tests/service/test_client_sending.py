"""A call whose request cannot be sent, or not to its end, ends as soon as it is known how."""

import asyncio

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame, HeadersFrame, RstStreamFrame

from pykv.client import Client, ServiceError
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE, MODEL = "/pykv.v1.Engine/Generate", "/pykv.v1.Engine/GetModel"
BEGIN = [(":status", "200"), ("content-type", "application/grpc")]
REFUSED = [*BEGIN, ("grpc-status", "8"), ("grpc-message", "too large")]
LONG = "a" * 200_000  # more than a server takes unasked


def refusing(connection, stream_id):
    connection.increment_flow_control_window(10**6)  # of the connection, for the calls that follow
    connection.send_headers(stream_id, REFUSED, end_stream=True)


def refusing_and_resetting(connection, stream_id):
    refusing(connection, stream_id)
    return RstStreamFrame(stream_id, int(ErrorCodes.NO_ERROR)).serialize()


def answering(connection, stream_id):
    delta = pb.Delta(token_ids=[5], finish_reason=pb.FINISH_REASON_STOP)
    data = pb.GenerateResponse(deltas=[delta]).SerializeToString()
    connection.increment_flow_control_window(10**6)
    connection.send_headers(stream_id, BEGIN)
    connection.send_data(stream_id, b"\0" + len(data).to_bytes(4, "big") + data)
    connection.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)


@pytest.mark.parametrize("answer", [refusing, refusing_and_resetting])
async def test_a_refusal_amid_a_long_request_is_heard(scripted, answer):
    server = scripted({})
    server.at_headers[GENERATE] = answer
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        with pytest.raises(ServiceError, match=r"^RESOURCE_EXHAUSTED: too large$"):
            await anext(client.generate(LONG))
        await client.get_model()
        assert server.num_connections == 1


async def test_an_answer_amid_a_long_request_is_read_and_the_rest_of_the_request_is_not_sent(scripted):
    server = scripted({})
    server.at_headers[GENERATE] = answering
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        assert [delta.token_ids async for delta in client.generate(LONG)] == [(5,)]
        await server.until(lambda: server.resets)
        await client.get_model()
        assert server.num_connections == 1


async def test_a_window_that_shrinks_below_nothing_is_waited_for(scripted):
    """The request goes on once the window is open again, by the settings and by an update."""

    def shrink(connection, _):
        connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})

    server = scripted({})
    server.at_headers[GENERATE] = shrink
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        call = asyncio.ensure_future(anext(client.generate(LONG)))
        await server.until(lambda: GENERATE in server.calls)
        connection, _, stream_id = server.calls[GENERATE]

        def open_again(connection, stream_id):
            connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
            connection.increment_flow_control_window(10**6)
            connection.increment_flow_control_window(10**6, stream_id)

        server.say(GENERATE, open_again)
        await server.until(
            lambda: connection.streams[stream_id].state_machine.state.name == "HALF_CLOSED_REMOTE"
        )
        server.say(GENERATE, answering)
        assert (await call).token_ids == (5,)


async def full(scripted):
    """A server that takes no more calls at once than none, and was asked for one before."""

    def answer(connection, stream_id):
        connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})
        connection.send_headers(stream_id, BEGIN)
        connection.send_data(stream_id, b"\0\0\0\0\0")
        connection.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)

    return scripted({MODEL: answer})


async def waiting(client):
    """A call that waits for room on the connection."""
    await client.get_model()
    call = asyncio.ensure_future(client.health())
    await asyncio.sleep(0)  # the connection is there: it runs until there is no room
    assert not call.done()
    return call


async def test_a_call_that_waits_for_room_begins_once_the_server_has_more(scripted):
    server = await full(scripted)
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        call = await waiting(client)
        server.answers["/grpc.health.v1.Health/Check"] = lambda connection, stream_id: (
            connection.send_headers(stream_id, BEGIN),
            connection.send_data(stream_id, b"\0\0\0\0\2\x08\1"),
            connection.send_headers(stream_id, [("grpc-status", "0")], end_stream=True),
        )[3:]
        more = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
        server.say(MODEL, lambda connection, _: connection.update_settings(more))
        assert await call == "SERVING"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda writer: writer.close(), "Connection lost"),
        (lambda writer: writer.write(GoAwayFrame(0, 1).serialize()), "did not begin the call"),
        (lambda writer: writer.write(GoAwayFrame(0, 1, 2).serialize()), "INTERNAL_ERROR"),
        (lambda writer: writer.write(b"\xff" * 64), "broke HTTP/2"),
    ],
)
async def test_a_call_that_waits_for_room_ends_with_its_connection(scripted, end, words):
    server = await full(scripted)
    async with server.running() as address, Client(address) as client, asyncio.timeout(20):
        call = await waiting(client)
        end(server.calls[MODEL][1])
        with pytest.raises(ServiceError, match=f"^UNAVAILABLE: .*{words}"):
            await call
        await client.get_model()
        assert server.num_connections == 2


async def test_a_call_that_waits_for_room_ends_with_its_client(scripted):
    server = await full(scripted)
    async with server.running() as address, asyncio.timeout(20):
        client = Client(address)
        call = await waiting(client)
        await client.aclose()
        with pytest.raises(ServiceError, match=r"^UNAVAILABLE: "):
            await call


async def test_a_frame_on_a_call_that_has_ended_is_named(scripted):
    def twice(connection, stream_id):
        answering(connection, stream_id)
        return HeadersFrame(stream_id, b"\x88", flags=["END_HEADERS", "END_STREAM"]).serialize()

    async with (
        (server := scripted({GENERATE: twice})).running() as address,
        Client(address) as client,
        asyncio.timeout(20),
    ):
        with pytest.raises(ServiceError, match=r"broke HTTP/2: a frame on the stream 1, which is not open"):
            await anext(client.generate([5]))
        assert server.num_connections == 1
